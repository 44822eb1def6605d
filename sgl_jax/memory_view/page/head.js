/** The head and the balance: numbers of the frame, as they are. */

import { byId, clockTime, count, element, pageRanges, rate, setNumber, setText } from "./format.js";
import { HOST_KINDS, KINDS } from "./palette.js";

const TOTALS = [
  ["step", "step", count],
  ["tokens_per_s", "tokens/s", rate],
  ["num_running", "running", count],
  ["num_waiting", "waiting", count],
  ["num_sessions", "sessions", count],
  ["time_s", "time", clockTime],
];

export class Head {
  #totals = new Map();
  #lines = []; // of each rank and pool
  #shape = "";

  constructor() {
    for (const [name, words] of TOTALS) {
      const value = element("dd", { id: `total-${name}` }, "–");
      this.#totals.set(name, value);
      byId("totals").append(element("div", {}, element("dt", {}, words), value));
    }
    for (const [id, kinds] of [["legend", KINDS], ["host-legend", HOST_KINDS]]) {
      for (const { state, name, meaning } of kinds.filter((kind) => kind.name)) {
        const words = meaning ? `${name}: ${meaning}` : name;
        byId(id).append(element("li", {}, element("i", { data: { kind: state } }), words));
      }
    }
  }

  update(state) {
    setText(byId("model"), state.hello.model);
    for (const [name, , words] of TOTALS) {
      const number = state.head[name];
      if (number !== undefined) setNumber(this.#totals.get(name), number, words(number));
    }
    document.documentElement.dataset.number = state.frame.number;
    const namesOf = ({ pools }) => pools.map((pool) => pool.name);
    const shape = JSON.stringify(state.frame.ranks.map(namesOf));
    if (shape !== this.#shape) this.#build(state, shape);
    for (const line of this.#lines) updateLine(line, state);
    this.#announce(state);
  }

  #build({ frame }, shape) {
    this.#shape = shape;
    this.#lines = frame.ranks.flatMap((rank) =>
      rank.pools.map((pool, index) => makeLine(rank.dp_rank, index, pool)),
    );
    byId("host-legend").hidden = !frame.ranks[0].pools.some((pool) => pool.is_host);
    byId("ranks").replaceChildren(...this.#lines.map((line) => line.root));
  }

  #announce({ frame }) {
    const open = frame.ranks.filter((rank) => !rank.is_closed);
    const words = open.map((rank) => `Rank ${rank.dp_rank} is not closed: ${rank.defect}.`);
    setText(byId("defect-alert"), words.join(" "));
    byId("defect-alert").hidden = !open.length;
  }
}

function makeLine(dpRank, pool, { name, is_host: isHost }) {
  const verdict = element("b", { className: "verdict" });
  const defect = element("span", { className: "defect" });
  const bar = element("div", { className: "bar", ariaHidden: "true" });
  const sum = element("span", { className: "sum" });
  const numbers = new Map();
  const parts = new Map();
  const kinds = (isHost ? HOST_KINDS : KINDS).filter((kind) => kind.name);
  kinds.forEach(({ state, name: words }, kind) => {
    const number = element("b", { data: { state } });
    const part = element("i", { data: { kind: state } });
    numbers.set(state, number);
    parts.set(state, part);
    bar.append(part);
    sum.append(kind ? " + " : "", element("span", { className: "term" }, `${words} `, number));
  });
  numbers.set("total", element("b", { data: { state: "total" } }));
  sum.append(element("span", { className: "term" }, " = ", numbers.get("total")));
  const words = element("p", {}, `Rank ${dpRank}, ${name}: `, verdict, " ", sum, defect);
  const root = element("li", { data: { rank: dpRank, pool } }, words, bar);
  return { root, dpRank, pool, verdict, defect, numbers, parts };
}

function updateLine(line, state) {
  const rank = state.frame.ranks[line.dpRank];
  const pages = state.pagesOf(line.dpRank, line.pool);
  for (const [name, number] of line.numbers) setNumber(number, pages[name]);
  for (const [name, part] of line.parts) part.style.flexGrow = pages[name];
  line.root.dataset.closed = rank.is_closed;
  setText(line.verdict, rank.is_closed ? "closed:" : "not closed:");
  const wrong = rank.defect_pages.filter(([pool]) => pool === line.pool).map(([, page]) => page);
  const where = wrong.length ? `; pages ${pageRanges(wrong)}` : "";
  setText(line.defect, rank.is_closed ? "" : `. ${rank.defect}${where}`);
}
