/** Details of the page under the pointer or cursor, and the history of a pinned one. */

import { count, element, plural } from "./format.js";
import { ask } from "./stream.js";

const DELAY_MS = 120;
const MAX_MOVES = 50;

export class PageDetails {
  #timer = 0;
  #request = 0; // the number of the last one: older answers are dropped
  pinned = null;

  /** `on.request(dpRank, row)` and `on.node(dpRank, node)` follow a page to its owner. */
  constructor(root, on) {
    this.root = root;
    this.on = on;
    this.#clear();
  }

  /** Describes `place` {dpRank, pool, poolName, page, words, frame}; null: the pointer left. */
  point(place) {
    if (this.pinned) return;
    clearTimeout(this.#timer);
    this.#request++;
    if (!place) return this.#clear();
    this.root.replaceChildren(heading(place));
    this.#timer = setTimeout(() => this.#fetch(place), DELAY_MS);
  }

  pin(place) {
    clearTimeout(this.#timer);
    this.pinned = place;
    this.root.replaceChildren(heading(place));
    return this.#fetch(place);
  }

  unpin() {
    this.pinned = null;
    this.#clear();
  }

  #clear() {
    this.root.replaceChildren(element("p", { className: "quiet" }, "Point at a page for details."));
  }

  async #fetch(place) {
    const number = ++this.#request;
    const { dpRank, pool, page, frame } = place;
    let parts;
    try {
      const found = await ask("page", { dp_rank: dpRank, pool, page, frame });
      parts = [facts(found)];
      if (this.pinned) parts.push(this.#buttons(place, found), history(found));
    } catch (error) {
      parts = [element("p", { role: "alert" }, `No details: ${error.message}`)];
    }
    if (number === this.#request) this.root.replaceChildren(heading(place), ...parts);
  }

  #buttons({ dpRank }, found) {
    const button = (words, onclick) => element("button", { type: "button", onclick }, words);
    const row = /^row (\d+)$/.exec(found.owner)?.[1];
    const buttons = [button("Unpin", () => this.unpin())];
    if (row) buttons.push(button("Show its request", () => this.on.request(dpRank, Number(row))));
    if (found.node !== null) {
      buttons.push(button("Show it in the tree", () => this.on.node(dpRank, found.node)));
    }
    return element("div", { className: "tools" }, ...buttons);
  }
}

const heading = ({ dpRank, poolName, words }) =>
  element("p", {}, element("b", {}, `Rank ${dpRank}, ${poolName}: ${words}`));

function facts(found) {
  const known = [
    `owner: ${found.owner}`,
    found.tokens && `tokens ${count(found.tokens[0])} to ${count(found.tokens[1])}`,
    found.rid && `request ${found.rid}`,
    found.session_id && `session ${found.session_id}`,
    found.node !== null && `node ${found.node}`,
    found.num_locks !== null && plural(found.num_locks, "lock"),
    found.last_access !== null && `last used at access ${count(found.last_access)} of the tree`,
  ];
  return element("p", { data: { owner: found.owner } }, known.filter(Boolean).join("; "));
}

function history({ moves, is_whole: isWhole, clock }) {
  const latest = moves.slice(-MAX_MOVES).reverse();
  const wordsOf = ({ clock: time, action, owner }) => `${time}: ${action}, ${owner}`;
  const items = latest.map((move) => element("li", {}, wordsOf(move)));
  const start = isWhole && moves.length <= MAX_MOVES ? "" : "; older moves were forgotten";
  return element("div", { className: "history" },
    element("p", {}, `Moves, latest first, at times of the pool's clock (now ${clock})${start}`),
    element("ol", { tabIndex: 0, ariaLabel: "Moves" }, ...items));
}
