/** The player of a recording: a slider, single steps, and play. */

import { byId, count, setText } from "./format.js";
import { ask } from "./stream.js";

const PLAY_INTERVAL_MS = 150;

export class Player {
  #wanted = -1;
  #isLoading = false;
  #timer = 0;
  number = -1; // of the frame shown
  isPlaying = false;

  /** `on.frame(frame, tree)` and `on.failure(message)`. */
  constructor(numFrames, on) {
    this.last = numFrames - 1;
    this.on = on;
    byId("player").hidden = false;
    byId("position").max = this.last;
    byId("position").addEventListener("input", (event) => this.goTo(Number(event.target.value)));
    byId("step-back").addEventListener("click", () => this.goTo(this.number - 1));
    byId("step-on").addEventListener("click", () => this.goTo(this.number + 1));
    byId("play").addEventListener("click", () => this.play(!this.isPlaying));
  }

  play(isPlaying) {
    this.isPlaying = isPlaying;
    byId("play").ariaPressed = isPlaying;
    setText(byId("play"), isPlaying ? "Pause" : "Play");
    clearTimeout(this.#timer);
    if (isPlaying) this.goTo(this.number >= this.last ? 0 : this.number + 1);
  }

  /** Loads a frame; of several wanted while one loads, only the last is loaded. */
  async goTo(number) {
    this.#wanted = Math.min(this.last, Math.max(0, number));
    if (this.#isLoading) return;
    this.#isLoading = true;
    try {
      while (this.#wanted !== this.number) {
        const loading = this.#wanted;
        const { frame, tree } = await ask(`frame?number=${loading}`);
        this.number = loading;
        this.on.frame(frame, tree);
        this.#describe();
      }
      this.#continue();
    } catch (error) {
      this.#wanted = this.number;
      this.play(false);
      this.on.failure(error.message);
    } finally {
      this.#isLoading = false;
    }
  }

  #continue() {
    if (!this.isPlaying) return;
    if (this.number >= this.last) this.play(false);
    else this.#timer = setTimeout(() => this.goTo(this.number + 1), PLAY_INTERVAL_MS);
  }

  #describe() {
    byId("position").value = this.number;
    setText(byId("position-text"), `${count(this.number)} of ${count(this.last)}`);
  }
}
