/** The timeline: stacked areas of pages for each rank, marks, the queue and tokens a second. */

import { clip, fit, setSlider, watch } from "./canvas.js";
import { byId, clockTime, count, element, plural, rate, setText } from "./format.js";
import {
  BLUE, CACHED, FREE, KINDS, PROTECTED, RESERVED, RUNNING, SESSION, VERMILION, pattern, theme,
} from "./palette.js";

const SPAN_S = 600;
const GUTTER = 64;
const AXIS = 18;
const MARK = 13; // pixels of a letter
const STACK = [RESERVED, RUNNING, PROTECTED, SESSION, CACHED, FREE]; // from below
/** Letters of marks, the rarest first. */
export const MARKS = {
  compilation: "C", preemption: "P", retract: "R", "session eviction": "S", "page eviction": "E",
};

/** The last sample of each pixel column: [{x, sample}], x from 0 to `width`. */
export function samplesByPixel(samples, start, end, width) {
  const found = [];
  for (const sample of samples) {
    if (sample.time_s < start || sample.time_s > end) continue;
    const x = Math.round((width * (sample.time_s - start)) / Math.max(1e-9, end - start));
    if (found.at(-1)?.x === x) found[found.length - 1] = { x, sample };
    else found.push({ x, sample });
  }
  return found;
}

/** The index of the sample nearest to a time; -1 without samples. */
export function nearestSample(samples, time) {
  let low = 0;
  let high = samples.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (samples[middle].time_s < time) low = middle + 1;
    else high = middle;
  }
  const isBefore = low > 0 &&
    (low === samples.length || time - samples[low - 1].time_s < samples[low].time_s - time);
  return isBefore ? low - 1 : low === samples.length ? -1 : low;
}

const wordsOfMarks = (marks) =>
  marks.map(({ dp_rank: rank, kind, count: number }) =>
    `${rank === null ? "" : `rank ${rank}: `}${plural(number, kind)}`).join(", ");

export function wordsOfSample(sample) {
  const words = `${clockTime(sample.time_s)}, step ${count(sample.step)}: ` +
    `${count(sample.num_running)} running, ${count(sample.num_waiting)} waiting, ` +
    `${rate(sample.tokens_per_s)} tokens/s`;
  return sample.marks.length ? `${words}; ${wordsOfMarks(sample.marks)}` : words;
}

export class Timeline {
  #canvas = byId("timeline-canvas");
  #seen = watch(byId("timeline"), () => (this.#isStale = true));
  #isStale = true;
  #newest = null;
  index = -1; // of the sample under the pointer

  /** `on.instant(sample or null)` follows the pointer, `on.open(index)` a click or Enter. */
  constructor(on) {
    this.on = on;
    for (const [kind, letter] of Object.entries(MARKS)) {
      byId("marks-legend").append(element("li", {}, element("b", {}, letter), ` ${kind}`));
    }
    const canvas = this.#canvas;
    canvas.addEventListener("pointermove", ({ offsetX }) => {
      if (!this.state?.frame) return;
      const [start, end] = this.#span();
      const part = (offsetX - GUTTER) / (canvas.clientWidth - GUTTER);
      this.#moveTo(nearestSample(this.state.samples, start + part * (end - start)));
    });
    canvas.addEventListener("pointerleave", () => this.#moveTo(-1));
    canvas.addEventListener("click", () => this.on.open(this.index));
    canvas.addEventListener("keydown", (event) => this.#onKey(event));
  }

  update(state) {
    this.#isStale ||= state.samples.at(-1) !== this.#newest || state.pool !== this.pool;
    this.#isStale ||= state.hello.is_recording;
    Object.assign(this, { state, pool: state.pool });
    this.#newest = state.samples.at(-1);
    this.#describe();
  }

  repaint() {
    this.#isStale = true;
  }

  draw() {
    if (!this.#isStale || !this.#seen.isVisible || !this.state?.frame) return;
    this.#isStale = false;
    const { samples, frame, hello } = this.state;
    const numRanks = frame.ranks.length;
    const lane = Math.max(32, Math.min(96, 240 / numRanks));
    const width = this.#canvas.parentElement.clientWidth;
    const height = numRanks * (lane + MARK + 4) + MARK + 64 + AXIS;
    const context = fit(this.#canvas, width, height);
    context.clearRect(0, 0, width, height);
    const [start, end] = this.#span();
    const columns = samplesByPixel(samples, start, end, width - GUTTER - 1);
    frame.ranks.forEach((rank, index) => {
      const top = index * (lane + MARK + 4);
      context.fillStyle = theme.ink;
      context.fillText(`rank ${rank.dp_rank}`, 2, top + MARK + lane / 2);
      this.#drawStack(context, columns, rank.dp_rank, top + MARK, lane);
      drawMarks(context, columns, (mark) => mark.dp_rank === rank.dp_rank, top);
    });
    const top = numRanks * (lane + MARK + 4);
    this.#drawLines(context, columns, top + MARK, 60);
    drawMarks(context, columns, (mark) => mark.dp_rank === null, top);
    drawAxis(context, start, end, width, height);
    const x = (time) => GUTTER + ((width - GUTTER - 1) * (time - start)) / Math.max(1e-9, end - start);
    if (hello.is_recording) cursor(context, x(frame.time_s), height - AXIS, 1, []);
    if (this.index >= 0) cursor(context, x(samples[this.index].time_s), height - AXIS, 2, [4, 3]);
  }

  /** First and last second drawn. */
  #span() {
    const { samples, frame, hello } = this.state;
    if (hello.is_recording) return [samples[0]?.time_s ?? 0, samples.at(-1)?.time_s ?? 1];
    return [Math.max(frame.time_s - SPAN_S, samples[0]?.time_s ?? 0), frame.time_s];
  }

  #drawStack(context, columns, dpRank, top, height) {
    const pagesOf = ({ sample }) => sample.ranks[dpRank]?.pages[this.state.pool];
    const known = columns.filter(pagesOf);
    let below = known.map(() => top + height);
    for (const kind of STACK) {
      const above = known.map((column, index) => {
        const pages = pagesOf(column);
        return below[index] - (height * pages[KINDS[kind].state]) / Math.max(1, pages.total);
      });
      context.beginPath();
      known.forEach(({ x }, index) => context.lineTo(GUTTER + x, above[index]));
      for (let index = known.length - 1; index >= 0; index--) {
        context.lineTo(GUTTER + known[index].x, below[index]);
      }
      context.fillStyle = pattern(context, kind);
      context.fill();
      below = above;
    }
  }

  #drawLines(context, columns, top, height) {
    const lines = [["num_waiting", VERMILION, [4, 3], "waiting"], ["tokens_per_s", BLUE, [], "tokens/s"]];
    lines.forEach(([name, colour, dash, words], place) => {
      const highest = Math.max(1, ...columns.map(({ sample }) => sample[name]));
      context.beginPath();
      for (const { x, sample } of columns) {
        context.lineTo(GUTTER + x, top + height - ((height - 4) * sample[name]) / highest);
      }
      context.strokeStyle = colour;
      context.lineWidth = 2;
      context.setLineDash(dash);
      context.stroke();
      const y = top + 12 + place * 30;
      context.fillStyle = theme.ink;
      context.fillText(clip(context, words, GUTTER - 4), 2, y);
      context.fillText(clip(context, `≤ ${rate(highest)}`, GUTTER - 4), 2, y + 13);
    });
    context.setLineDash([]);
  }

  #moveTo(index) {
    if (index === this.index) return;
    this.index = index;
    this.#isStale = true;
    this.#describe();
    this.on.instant(this.state.samples[index] ?? null);
  }

  #describe() {
    const { samples } = this.state;
    if (this.index >= samples.length) this.index = -1;
    const sample = samples[this.index];
    const words = sample ? wordsOfSample(sample) : "";
    setText(byId("timeline-readout"), words);
    setSlider(this.#canvas, this.index, samples.length - 1, words || "now");
  }

  #onKey(event) {
    const last = (this.state?.samples.length ?? 0) - 1;
    const here = this.index < 0 ? last + 1 : this.index;
    const to = {
      ArrowLeft: here - 1, ArrowRight: here + 1, PageUp: here - 30, PageDown: here + 30,
      Home: 0, End: last, Escape: -1,
    }[event.key];
    if (event.key === "Enter") this.on.open(this.index);
    else if (to === undefined || last < 0) return;
    else this.#moveTo(event.key === "Escape" ? -1 : Math.min(last, Math.max(0, to)));
    event.preventDefault();
  }
}

function cursor(context, x, height, width, dash) {
  context.beginPath();
  context.moveTo(x, 0);
  context.lineTo(x, height);
  context.strokeStyle = theme.ink;
  context.lineWidth = width;
  context.setLineDash(dash);
  context.stroke();
  context.setLineDash([]);
}

/** The letter of the rarest kind of mark in each stretch of `MARK` pixels. */
function drawMarks(context, columns, isShown, top) {
  const kinds = Object.keys(MARKS);
  const rarest = new Map();
  for (const { x, sample } of columns) {
    for (const mark of sample.marks.filter(isShown)) {
      const [place, kind] = [Math.floor(x / MARK), kinds.indexOf(mark.kind)];
      if (kind >= 0) rarest.set(place, Math.min(kind, rarest.get(place) ?? kind));
    }
  }
  context.fillStyle = theme.ink;
  for (const [place, kind] of rarest) {
    context.fillText(MARKS[kinds[kind]], GUTTER + place * MARK + 2, top + MARK / 2 + 1);
  }
}

function drawAxis(context, start, end, width, height) {
  const steps = [1, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 14400, 86400];
  const room = (width - GUTTER) / 90; // labels
  const step = steps.find((seconds) => (end - start) / seconds <= room) ?? 86400 * 7;
  context.fillStyle = theme.ink;
  for (let at = Math.ceil(Math.max(0, start) / step) * step; at <= end; at += step) {
    const x = GUTTER + ((width - GUTTER - 1) * (at - start)) / Math.max(1e-9, end - start);
    context.fillRect(x, height - AXIS, 1, 4);
    const words = clockTime(at);
    context.fillText(words, Math.min(x, width - context.measureText(words).width), height - 7);
  }
}
