/** Running requests as strips `protected | committed | allocated`, on one scale. */

import { CanvasList, clip } from "./canvas.js";
import { byId, count, plural, rate } from "./format.js";
import { PROTECTED, RUNNING, SESSION, pattern, theme } from "./palette.js";

const HEIGHT = 32;

export const leasesOf = (frame) =>
  frame.ranks.flatMap((rank) => rank.leases.map((lease) => ({ ...lease, dpRank: rank.dp_rank })));

export function wordsOf(lease) {
  const { protected: shared, committed, allocated } = lease;
  const words = [
    `rank ${lease.dpRank} row ${lease.row}`,
    `${count(shared)} | ${count(committed)} | ${count(allocated)}`,
    lease.is_idle ? "idle"
      : lease.rid === null ? "prefix on its way from the host"
      : `${rate(lease.tokens_per_s)} tokens/s`,
    lease.num_retractions > 0 && plural(lease.num_retractions, "retract"),
    lease.rid,
    lease.session_id && `session ${lease.session_id}`,
    lease.text,
  ];
  return words.filter(Boolean).join(" · ");
}

export class Strips {
  #scale = 1;

  constructor(onSelect) {
    this.list = new CanvasList(byId("strips"), {
      heightOf: () => HEIGHT,
      describe: wordsOf,
      drawItem: (context, lease, y, width) => this.#drawStrip(context, lease, y, width),
      onChoose: (lease) =>
        onSelect(lease && { dpRank: lease.dpRank, row: lease.row, node: lease.node }),
    });
  }

  update({ frame, selected }) {
    const leases = leasesOf(frame);
    this.#scale = Math.max(1, ...leases.map((lease) => lease.allocated));
    this.list.chosen = leases.findIndex(
      (lease) => lease.dpRank === selected?.dpRank && lease.row === selected.row,
    );
    this.list.update(leases);
  }

  draw() {
    this.list.draw();
  }

  #drawStrip(context, lease, y, width) {
    const { protected: shared, committed, allocated, is_idle: isIdle } = lease;
    const x = (tokens) => 4 + ((width - 8) * tokens) / this.#scale;
    const [top, height] = [y + 18, 9];
    context.fillStyle = theme.ink;
    context.fillText(clip(context, wordsOf(lease), width - 8), 4, y + 9);
    context.fillStyle = pattern(context, PROTECTED);
    context.fillRect(x(0), top, x(shared) - x(0), height);
    context.fillStyle = pattern(context, isIdle ? SESSION : RUNNING);
    context.fillRect(x(shared), top, x(committed) - x(shared), height);
    context.strokeStyle = theme.quiet;
    context.lineWidth = 1;
    context.strokeRect(x(0) + 0.5, top + 0.5, Math.max(1, x(allocated) - x(0) - 1), height - 1);
  }
}
