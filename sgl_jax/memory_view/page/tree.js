/** The prefix tree of a rank as an icicle: zoom into nodes, find a prefix. */

import { clip, fit, setSlider, watch } from "./canvas.js";
import { byId, count, element, plural, setText } from "./format.js";
import { layoutIcicle } from "./icicle.js";
import { BLUE, VERMILION, theme } from "./palette.js";
import { ask } from "./stream.js";

const AGE_STEPS = 5;

export function wordsOfNode(node) {
  const words = [
    `node ${node.id}`,
    plural(node.num_pages[0], "page"),
    `tokens ${count(node.start)} to ${count(node.end)}`,
    plural(node.num_locks, "lock"),
    `last used at access ${count(node.last_access)}`,
    node.namespace && `namespace ${node.namespace}`,
    node.tombstones.length > 0 &&
      `window pages gone: ${node.tombstones.map(([, number]) => count(number)).join(" + ")}`,
    node.snapshots.length > 0 && plural(node.snapshots.length, "snapshot"),
    node.text,
  ];
  return words.filter(Boolean).join("; ");
}

/** The body of a query: token ids if there are only numbers, else text. */
export function parseQuery(query) {
  const ids = query.match(/\d+/g);
  return ids && /^[\s\d,[\]]+$/.test(query) ? { input_ids: ids.map(Number) } : { text: query };
}

export class TreeView {
  #rects = [];
  #isStale = true;
  #focus = null;
  #found = new Set();
  #steps = new Map(); // of age by id: 0 oldest
  #canvas = byId("tree-canvas");
  #seen = watch(byId("tree"), () => (this.#isStale = true));
  cursor = null; // a node's id

  constructor(onSelect) {
    this.onSelect = onSelect;
    byId("tree-rank").addEventListener("change", () => this.#zoomTo(null));
    byId("tree-colour").addEventListener("change", () => (this.#isStale = true));
    byId("tree-up").addEventListener("click", () => this.#zoomTo(null));
    byId("find").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#find();
    });
    this.#canvas.addEventListener("keydown", (event) => this.#onKey(event));
    this.#canvas.addEventListener("pointermove", (event) => this.#pointAt(event));
    this.#canvas.addEventListener("click", (event) => {
      this.#pointAt(event);
      if (this.cursor !== null) this.#zoomTo(this.cursor === this.#focus ? null : this.cursor);
    });
  }

  get #rank() {
    return this.state?.tree?.ranks[byId("tree-rank").selectedIndex];
  }

  update(state) {
    if (this.state === state && this.tree === state.tree) return;
    Object.assign(this, { state, tree: state.tree });
    const listed = byId("tree-rank");
    if (state.tree && listed.length !== state.tree.ranks.length) {
      listed.replaceChildren(
        ...state.tree.ranks.map((rank) => element("option", {}, String(rank.dp_rank))),
      );
    }
    this.#layout();
  }

  /** Shows a node, wherever it is. */
  show(dpRank, node) {
    byId("tree-rank").selectedIndex = dpRank;
    this.#zoomTo(null);
    this.#moveTo(node);
    byId("tree").scrollIntoView();
  }

  draw() {
    if (!this.#isStale || !this.#seen.isVisible || !this.#rank) return;
    this.#isStale = false;
    const width = this.#canvas.parentElement.clientWidth;
    const height = Math.min(420, 0.6 * innerHeight);
    const context = fit(this.#canvas, width, height);
    context.clearRect(0, 0, width, height);
    for (const rect of this.#rects) this.#drawNode(context, rect, width, height);
    const current = this.#rects.find(({ node }) => node.id === this.cursor);
    if (current) this.#strokeNode(context, current, width, height, theme.ink, 3);
  }

  #layout() {
    this.#isStale = true;
    const rank = this.#rank;
    if (!rank) return;
    if (!rank.nodes.some((node) => node.id === this.#focus)) this.#focus = null;
    this.#rects = layoutIcicle(rank.nodes, this.#focus);
    const byAge = rank.nodes.toSorted((a, b) => a.last_access - b.last_access);
    const step = (index) => Math.floor((AGE_STEPS * index) / byAge.length);
    this.#steps = new Map(byAge.map((node, index) => [node.id, step(index)]));
    this.#describe();
  }

  #drawNode(context, rect, width, height) {
    const { node } = rect;
    const [x, w] = [rect.left * width, Math.max(1, rect.width * width - 1)];
    const [y, h] = [rect.top * height, Math.max(2, rect.height * height - 1)];
    const isByAge = byId("tree-colour").value === "age";
    const strength = isByAge ? 0.15 + 0.2 * this.#steps.get(node.id) : node.num_locks ? 0.9 : 0.15;
    context.fillStyle = isByAge || !node.num_locks ? BLUE : VERMILION;
    context.globalAlpha = strength;
    context.fillRect(x, y, w, h);
    context.globalAlpha = 1;
    const perToken = h / Math.max(1, node.end - node.start);
    for (const [first, number] of node.tombstones) {
      const size = this.state.hello.page_size * perToken;
      hatch(context, x, y + first * size, w, number * size);
    }
    context.fillStyle = theme.ink;
    for (const position of node.snapshots) {
      context.fillRect(x, y + (position - node.start) * perToken - 2, Math.min(w, 10), 2);
    }
    if (this.#found.has(node.id)) this.#strokeNode(context, rect, width, height, VERMILION, 3);
    if (w < 40 || h < 14) return;
    const locks = node.num_locks ? `, ${plural(node.num_locks, "lock")}` : "";
    const words = node.text || `${plural(node.num_pages[0], "page")}${locks}`;
    const label = clip(context, words, w - 12);
    context.fillStyle = theme.surface;
    context.fillRect(x + 3, y + 2, context.measureText(label).width + 6, 14);
    context.fillStyle = theme.ink;
    context.fillText(label, x + 6, y + 9);
  }

  #strokeNode(context, rect, width, height, colour, lineWidth) {
    context.strokeStyle = colour;
    context.lineWidth = lineWidth;
    context.strokeRect(rect.left * width + 1, rect.top * height + 1,
      Math.max(2, rect.width * width - 3), Math.max(2, rect.height * height - 3));
  }

  #pointAt({ offsetX, offsetY }) {
    const [x, y] = [offsetX / this.#canvas.clientWidth, offsetY / this.#canvas.clientHeight];
    const under = this.#rects.find(
      (rect) => x >= rect.left && x < rect.left + rect.width &&
        y >= rect.top && y < rect.top + rect.height,
    );
    this.#moveTo(under?.node.id ?? null);
  }

  #moveTo(id) {
    if (id === this.cursor) return;
    this.cursor = id;
    this.#isStale = true;
    this.#describe();
  }

  #zoomTo(id) {
    this.#focus = id;
    this.#layout();
    const node = this.#rects.find((rect) => rect.node.id === id)?.node;
    if (node) this.onSelect({ dpRank: this.#rank.dp_rank, row: null, node: id });
  }

  #describe() {
    const index = this.#rects.findIndex(({ node }) => node.id === this.cursor);
    const rank = this.#rank;
    const leftOut = rank.num_pages_left_out
      ? `; ${plural(rank.num_pages_left_out, "page")} of smaller nodes not shown` : "";
    const whole = `Rank ${rank.dp_rank}: ${plural(rank.nodes.length, "node")}${leftOut}`;
    const words = index < 0 ? whole : wordsOfNode(this.#rects[index].node);
    setText(byId("tree-readout"), words);
    setSlider(this.#canvas, index, this.#rects.length - 1, words);
  }

  #onKey(event) {
    const nodes = this.#rects.map((rect) => rect.node);
    const here = nodes.find((node) => node.id === this.cursor);
    const siblings = nodes.filter((node) => node.parent === here?.parent);
    const beside = (step) => siblings[siblings.indexOf(here) + step];
    const to = {
      ArrowUp: () => nodes.find((node) => node.id === here?.parent),
      ArrowDown: () => (here ? nodes.find((node) => node.parent === here.id) : nodes[0]),
      ArrowLeft: () => beside(-1),
      ArrowRight: () => beside(1) ?? (here ? undefined : nodes[0]),
      Home: () => nodes[0],
      End: () => nodes.at(-1),
    }[event.key];
    if (to) this.#moveTo(to()?.id ?? this.cursor);
    else if (event.key === "Enter" && here) this.#zoomTo(here.id);
    else if (event.key === "Escape") this.#zoomTo(null);
    else return;
    event.preventDefault();
  }

  async #find() {
    const isRecording = this.state.hello.is_recording;
    const frame = isRecording ? this.state.frame.number : undefined;
    const query = parseQuery(byId("find-text").value.trim());
    if (isRecording && "text" in query) {
      setText(byId("find-result"), "A recording has no tokenizer: give token ids.");
      return;
    }
    const namespace = byId("find-namespace").value.trim();
    try {
      const { num_tokens: given, ranks } = await ask("find", { ...query, namespace, frame });
      const words = ranks.map(
        (rank) => `rank ${rank.dp_rank}: ${count(rank.num_tokens)} of ${plural(given, "token")}`,
      );
      setText(byId("find-result"), `Found on ${words.join(", ")}.`);
      const best = ranks.toSorted((a, b) => b.num_tokens - a.num_tokens)[0];
      this.#found = new Set(best?.nodes);
      if (best?.nodes.length) this.show(best.dp_rank, best.nodes.at(-1));
    } catch (error) {
      setText(byId("find-result"), error.message);
    }
    this.#isStale = true;
  }
}

function hatch(context, x, y, width, height) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.beginPath();
  for (let at = x - height; at < x + width; at += 6) {
    context.moveTo(at, y + height);
    context.lineTo(at + height, y);
  }
  context.strokeStyle = theme.ink;
  context.lineWidth = 1;
  context.stroke();
  context.restore();
}
