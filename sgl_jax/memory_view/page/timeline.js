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

/** The last sample of each pixel column: [{x, sample}], x from 0 to `width`. `placeOf(index)` is
 * where a sample lies, ascending, in the units of `start` and `end`. */
export function samplesByPixel(samples, placeOf, start, end, width) {
  const found = [];
  samples.forEach((sample, index) => {
    const place = placeOf(index);
    if (place < start || place > end) return;
    const x = Math.round((width * (place - start)) / Math.max(1e-9, end - start));
    if (found.at(-1)?.x === x) found.pop();
    found.push({ x, sample });
  });
  return found;
}

/** The index, below `length`, whose place is nearest; -1 if there is none. */
export function nearest(length, placeOf, place) {
  let low = 0;
  let high = length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (placeOf(middle) < place) low = middle + 1;
    else high = middle;
  }
  return low > 0 && place - placeOf(low - 1) < placeOf(low) - place ? low - 1 : Math.min(low, high);
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
      const place = start + part * (end - start);
      this.#moveTo(nearest(this.state.samples.length, this.#placeOf, place));
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
    if (state.instant) this.index = state.samples.indexOf(state.instant); // old ones are dropped
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
    const columns = samplesByPixel(samples, this.#placeOf, start, end, width - GUTTER - 1);
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
    const scale = (width - GUTTER - 1) / Math.max(1e-9, end - start);
    const x = (place) => GUTTER + scale * (place - start);
    drawAxis(context, [start, end], x, height, hello.is_recording ? count : clockTime);
    if (hello.is_recording) cursor(context, x(frame.number), height - AXIS, 1, []);
    if (this.index >= 0) cursor(context, x(this.#placeOf(this.index)), height - AXIS, 2, [4, 3]);
  }

  /** Live samples lie at their second, those of a recording at their number: steps may share an
   * instant. */
  #placeOf = (index) =>
    this.state.hello.is_recording ? index : this.state.samples[index].time_s;

  /** First and last place drawn. */
  #span() {
    const { samples, frame, hello } = this.state;
    if (hello.is_recording) return [0, samples.length - 1];
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
    const lines = [
      ["num_waiting", VERMILION, [4, 3], "waiting"],
      ["tokens_per_s", BLUE, [], "tokens/s"],
    ];
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

function drawAxis(context, [start, end], x, height, wordsOf) {
  const width = x(end);
  const room = (width - GUTTER) / 90; // labels
  const steps = [1, 5, 10, 30, 60, 120, 300, 600, 1800, 3600];
  const step = steps.find((each) => (end - start) / each <= room) ?? 14400;
  context.fillStyle = theme.ink;
  for (let at = Math.ceil(start / step) * step; at <= end; at += step) {
    const words = wordsOf(at);
    context.fillRect(x(at), height - AXIS, 1, 4);
    context.fillText(words, Math.min(x(at), width - context.measureText(words).width), height - 7);
  }
}
