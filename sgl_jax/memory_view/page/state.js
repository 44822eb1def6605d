/** All that the page shows: the frame, the codes of all pages, the tree and the timeline. */

const TIMELINE_S = 600;
const SAMPLE_INTERVAL_S = 1;

export class State {
  frame = null; // shown; null before the first
  tree = null; // likewise
  instant = null; // a sample that is shown instead of the frame in head and balance
  selected = null; // {dpRank, row, node}: outlined in the drawings
  pool = 0; // of the maps and the timeline
  isFrozen = false;
  codes = []; // Int32Array by rank and pool, of the frame shown

  constructor(hello) {
    this.renew(hello);
  }

  /** Starts again after a lost connection; the page keeps its frame until the next one. */
  renew(hello) {
    this.hello = hello;
    this.samples = [...hello.samples]; // by time
    this.newest = { frame: null, tree: null, codes: [] };
    this.marks = []; // since the last sample
  }

  add(frame) {
    for (const rank of frame.ranks) {
      const codes = (this.newest.codes[rank.dp_rank] ??= []);
      rank.pools.forEach((pool, index) => {
        if (codes[index]?.length !== pool.num_pages) codes[index] = new Int32Array(pool.num_pages);
        for (const [first, length, code] of pool.runs) {
          codes[index].fill(code, first, first + length);
        }
      });
    }
    this.newest.frame = frame;
    if (!this.hello.is_recording) this.#addSample(frame);
  }

  addTree(tree) {
    this.newest.tree = tree;
  }

  /** Frozen, the page keeps copies of the codes, which frames change in place. */
  freeze(isFrozen) {
    this.show();
    this.isFrozen = isFrozen;
    if (isFrozen) this.codes = structuredClone(this.codes);
  }

  /** Makes the newest frame the one shown, unless the page is frozen. */
  show() {
    if (this.isFrozen || !this.newest.frame) return;
    this.frame = this.newest.frame;
    this.tree = this.newest.tree ?? this.tree;
    this.codes = this.newest.codes;
  }

  /** Head and balance show this: the frame, or an instant of the timeline. */
  get head() {
    return this.instant ?? this.frame;
  }

  pagesOf(dpRank, pool) {
    return this.instant?.ranks[dpRank]?.pages[pool] ?? this.frame.ranks[dpRank].pools[pool].pages;
  }

  /** isIdle[row]: the row belongs to an idle session. */
  idleRows(dpRank) {
    const isIdle = [];
    for (const lease of this.frame.ranks[dpRank].leases) isIdle[lease.row] = lease.is_idle;
    return isIdle;
  }

  #addSample(frame) {
    this.marks.push(...frame.marks);
    const last = this.samples.at(-1);
    if (last && frame.time_s - last.time_s < SAMPLE_INTERVAL_S) return;
    const { time_s, step, num_running, num_waiting, tokens_per_s } = frame;
    const ranks = frame.ranks.map((rank) => ({ pages: rank.pools.map((pool) => pool.pages) }));
    const marks = this.marks.splice(0);
    this.samples.push({ time_s, step, num_running, num_waiting, tokens_per_s, ranks, marks });
    while (this.samples[0].time_s < time_s - TIMELINE_S) this.samples.shift();
  }
}
