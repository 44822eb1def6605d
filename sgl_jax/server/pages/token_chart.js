// The times of an answer's tokens: a bar for each token, and the figures made from them.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 100;
const MIN_TOKENS = 80; // width of the chart while there are fewer, so that bars stay thin

const ms = (time) => `${time < 10 ? time.toFixed(1) : Math.round(time)} ms`;

export class TokenChart {
  // `element(id)` returns an element of the page.
  constructor(element) {
    this.element = element;
    this.clear();
  }

  clear() {
    this.top = 0; // ms: the time of a bar of full height
    this.bars = [];
    this.times = []; // ms since the previous token; of the first: since the request
    this.element("chart").replaceChildren();
    for (const id of ["first-token", "rate", "output-tokens", "prompt-tokens", "cached-tokens"]) {
      this.element(id).textContent = "–";
    }
    this.element("chart-top").textContent = ms(0);
  }

  start() {
    this.clear();
    this.lastAt = performance.now();
  }

  // `count` tokens came at once: the first after the time since the previous one, the others with it.
  add(count) {
    const now = performance.now();
    for (let i = 0; i < count; i++) {
      this.times.push(i === 0 ? now - this.lastAt : 0);
    }
    if (count > 0) {
      this.lastAt = now;
      this.draw(count);
    }
  }

  showUsage(usage) {
    this.element("output-tokens").textContent = usage.completion_tokens;
    this.element("prompt-tokens").textContent = usage.prompt_tokens;
    this.element("cached-tokens").textContent = usage.prompt_tokens_details?.cached_tokens ?? "–";
  }

  draw(count) {
    const [first, ...later] = this.times;
    const seconds = later.reduce((sum, time) => sum + time, 0) / 1000;
    this.element("first-token").textContent = ms(first);
    if (seconds > 0) {
      this.element("rate").textContent = (later.length / seconds).toFixed(1);
    }
    const numDrawn = this.times.length - count;
    for (let place = numDrawn; place < this.times.length; place++) {
      this.bars.push(this.bar(place));
    }
    const chart = this.element("chart");
    chart.setAttribute("viewBox", `0 0 ${Math.max(this.times.length, MIN_TOKENS)} ${HEIGHT}`);
    chart.append(...this.bars.slice(numDrawn));
    // The first token waits for the queue and the prompt: its bar is cut at the top of the others.
    const top = later.reduce((most, time) => Math.max(most, time), 0) || first;
    const isSame = top === this.top;
    this.top = top;
    this.element("chart-top").textContent = ms(top);
    for (let place = isSame ? numDrawn : 0; place < this.times.length; place++) {
      this.scale(this.bars[place], this.times[place]);
    }
  }

  bar(place) {
    const bar = document.createElementNS(SVG, "rect");
    bar.setAttribute("x", place + 0.1);
    bar.setAttribute("width", 0.8);
    if (place === 0) {
      bar.classList.add("first");
    }
    const title = document.createElementNS(SVG, "title");
    title.textContent = `token ${place + 1}: ${ms(this.times[place])}`;
    bar.append(title);
    return bar;
  }

  scale(bar, time) {
    const height = Math.max(1, HEIGHT * Math.min(1, time / this.top));
    bar.setAttribute("y", HEIGHT - height);
    bar.setAttribute("height", height);
  }
}
