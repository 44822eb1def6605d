/** The section of page maps: one map a rank, of the pool that is chosen. */

import { byId, element, setText } from "./format.js";
import { PageDetails } from "./page_details.js";
import { PageMap } from "./page_map.js";
import { onTheme } from "./palette.js";

export class PageMaps {
  #maps = [];

  /** `on.select({dpRank, row, node})` follows a page to its owner. */
  constructor(on) {
    this.details = new PageDetails(byId("page-details"), {
      request: (dpRank, row) => on.select({ dpRank, row, node: null }),
      node: (dpRank, node) => on.select({ dpRank, row: null, node }),
    });
    byId("pool").addEventListener("change", (event) => {
      this.state.pool = event.target.selectedIndex;
      on.change();
    });
    for (const [id, factor] of [["zoom-in", 2], ["zoom-out", 0.5], ["zoom-fit", 0]]) {
      byId(id).addEventListener("click", () => this.#maps.forEach((map) => map.zoomBy(factor)));
    }
    byId("map").addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.details.unpin();
    });
    addEventListener("resize", on.change);
    onTheme(() => {
      this.#maps.forEach((map) => map.repaint());
      if (this.state) on.change();
    });
  }

  update(state) {
    this.state = state;
    const { ranks } = state.frame;
    this.#listPools(ranks[0].pools.map((pool) => pool.name));
    if (this.#maps.length !== ranks.length) {
      this.#maps = ranks.map((rank) => this.#makeMap(rank.dp_rank));
      byId("maps").replaceChildren(...this.#maps.map((map) => map.root));
    }
    for (const map of this.#maps) {
      const { selected, pool } = state;
      const isHost = ranks[map.dpRank].pools[pool].is_host;
      map.update(state.codes[map.dpRank][pool], isHost ? [] : state.idleRows(map.dpRank), {
        isHost,
        outlined: (!isHost && selected?.dpRank === map.dpRank && selected.row) || 0,
        defects: ranks[map.dpRank].defect_pages.filter(([p]) => p === pool).map(([, page]) => page),
      });
    }
  }

  draw(now) {
    for (const map of this.#maps) map.draw(now);
  }

  /** Rows of the table: pages in order, neighbours of one owner together. */
  ranges(limit) {
    const found = [];
    for (const map of this.#maps) {
      const { shown } = map;
      for (let page = 0; page < shown.length && found.length < limit; ) {
        let end = page + 1;
        while (end < shown.length && shown[end] === shown[page]) end++;
        found.push([map.dpRank, page, end - page, map.ownerOf(page)]);
        page = end;
      }
    }
    return found;
  }

  #makeMap(dpRank) {
    const place = (page) => ({
      dpRank,
      page,
      pool: this.state.pool,
      poolName: byId("pool").value,
      words: this.#maps[dpRank].wordsOf(page),
      frame: this.state.hello.is_recording ? this.state.frame.number : undefined,
    });
    return new PageMap(dpRank, {
      point: (page) => this.details.point(page === null ? null : place(page)),
      pin: (page) => this.details.pin(place(page)),
    });
  }

  #listPools(names) {
    const listed = byId("pool");
    if (listed.length === names.length) {
      names.forEach((name, index) => setText(listed.options[index], name));
      return;
    }
    listed.replaceChildren(...names.map((name) => element("option", {}, name)));
    this.state.pool = Math.min(this.state.pool, names.length - 1);
    listed.selectedIndex = this.state.pool;
  }
}
