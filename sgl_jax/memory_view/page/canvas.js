/** Canvases that fit their box, and a canvas that shows a long list of items as it scrolls. */

import { theme } from "./palette.js";

export const FONT = "12px system-ui, sans-serif";

/** Sizes a canvas in CSS pixels; returns its context with CSS pixels as units. */
export function fit(canvas, width, height) {
  const scale = devicePixelRatio || 1;
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) {
    Object.assign(canvas, { width: w, height: h });
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.font = FONT;
  context.textBaseline = "middle";
  return context;
}

/** Watches the size and visibility of a drawing; calls `redraw` when it must be drawn again. */
export function watch(target, redraw) {
  const seen = { isVisible: true };
  new IntersectionObserver(([entry]) => {
    seen.isVisible = entry.isIntersecting;
    if (seen.isVisible) redraw();
  }, { rootMargin: "100px" }).observe(target);
  new ResizeObserver(redraw).observe(target);
  return seen;
}

/** Sets what a screen reader reads of a drawing that is a slider. */
export function setSlider(canvas, value, max, words) {
  canvas.ariaValueMax = Math.max(0, max);
  canvas.ariaValueNow = Math.max(0, value);
  canvas.ariaValueText = words;
}

/** `text` cut to `width` pixels. */
export function clip(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let length = Math.floor((text.length * width) / context.measureText(text).width);
  while (length > 0 && context.measureText(`${text.slice(0, length)}…`).width > width) length--;
  return length > 0 ? `${text.slice(0, length)}…` : "";
}

/** Only the items in sight are drawn. `drawItem(context, item, y, width)` draws one,
 * `heightOf(item)` is its height in pixels, `describe(item)` its words. */
export class CanvasList {
  #canvas;
  #scroller;
  #seen;
  #isStale = false;
  #tops = [0];
  items = [];
  chosen = -1;

  constructor(canvas, { drawItem, heightOf, describe, onChoose }) {
    this.#canvas = canvas;
    this.#scroller = canvas.closest(".scroller");
    Object.assign(this, { drawItem, heightOf, describe, onChoose });
    const redraw = () => (this.#isStale = true);
    this.#seen = watch(this.#scroller, redraw);
    this.#scroller.addEventListener("scroll", redraw);
    canvas.addEventListener("keydown", (event) => this.#onKey(event));
    canvas.addEventListener("click", (event) => this.choose(this.#itemAt(event.offsetY)));
  }

  update(items) {
    this.items = items;
    this.#tops = [0];
    for (const item of items) this.#tops.push(this.#tops.at(-1) + this.heightOf(item));
    if (this.chosen >= items.length) this.chosen = -1;
    this.#canvas.parentElement.style.height = `${this.#tops.at(-1)}px`;
    this.#describe();
    this.#isStale = true;
  }

  choose(index) {
    this.chosen = index === this.chosen ? -1 : index;
    this.#describe();
    this.onChoose?.(this.items[this.chosen] ?? null);
    this.#isStale = true;
  }

  draw() {
    if (!this.#isStale || !this.#seen.isVisible) return;
    this.#isStale = false;
    const width = this.#scroller.clientWidth;
    const height = Math.min(this.#tops.at(-1), this.#scroller.clientHeight);
    const context = fit(this.#canvas, width, Math.max(1, height));
    context.clearRect(0, 0, width, height);
    const top = this.#scroller.scrollTop;
    for (let index = this.#indexAt(top); index < this.items.length; index++) {
      const y = this.#tops[index] - top;
      if (y > height) break;
      this.drawItem(context, this.items[index], y, width);
      if (index === this.chosen) {
        context.strokeStyle = theme.ink;
        context.lineWidth = 2;
        context.strokeRect(1, y + 1, width - 2, this.heightOf(this.items[index]) - 2);
      }
    }
  }

  #indexAt(y) {
    const after = this.#tops.findIndex((top) => top > y);
    return after < 0 ? this.items.length : after - 1;
  }

  #itemAt(offsetY) {
    return Math.min(this.items.length - 1, this.#indexAt(offsetY + this.#scroller.scrollTop));
  }

  #describe() {
    const item = this.items[this.chosen];
    const words = item ? this.describe(item) : `${this.items.length} listed, none selected`;
    setSlider(this.#canvas, this.chosen, this.items.length - 1, words);
  }

  #onKey(event) {
    const last = this.items.length - 1;
    const to = {
      ArrowDown: Math.min(last, this.chosen + 1),
      ArrowUp: Math.max(0, this.chosen - 1),
      Home: 0,
      End: last,
      Escape: -1,
    }[event.key];
    if (to === undefined || last < 0) return;
    event.preventDefault();
    if (to !== this.chosen) this.choose(to);
    if (to >= 0) this.#scrollTo(to);
  }

  #scrollTo(index) {
    const [top, bottom] = [this.#tops[index], this.#tops[index + 1]];
    const { scrollTop, clientHeight } = this.#scroller;
    if (top < scrollTop) this.#scroller.scrollTop = top;
    if (bottom > scrollTop + clientHeight) this.#scroller.scrollTop = bottom - clientHeight;
  }
}
