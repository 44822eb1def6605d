/** Sessions: turns as a line, rollbacks and forks as branches. */

import { CanvasList, clip } from "./canvas.js";
import { byId, count, duration, plural, setText } from "./format.js";
import { BLUE, VERMILION, theme } from "./palette.js";
import { familyOrder, layoutTurns } from "./turns.js";

const TEXT_HEIGHT = 20;
const LANE_HEIGHT = 16;
const MAX_PITCH = 28; // pixels between turns
const DOT = 4;

export function wordsOfSession(session) {
  const { forked_from: source } = session;
  const turns = session.turns.length + session.num_left_out;
  const words = [
    session.session_id,
    session.is_running ? "running" : `idle ${duration(session.idle_s)}`,
    plural(turns, "turn"),
    plural(session.num_tokens, "token"),
    session.row === null ? "not in place" : `rank ${session.dp_rank} row ${session.row}`,
    session.row !== null && `holds ${plural(session.num_pages, "page")}`,
    session.row !== null && `eviction would free ${count(session.num_pages_freed_by_eviction)}`,
    source && `forked from ${source.session_id} after ${plural(source.num_turns, "turn")}`,
  ];
  return words.filter(Boolean).join(" · ");
}

export class Sessions {
  constructor(onSelect) {
    this.list = new CanvasList(byId("session-canvas"), {
      heightOf: (session) => TEXT_HEIGHT + session.layout.lanes * LANE_HEIGHT + 4,
      describe: wordsOfSession,
      drawItem: drawSession,
      onChoose: (session) =>
        onSelect(session && { dpRank: session.dp_rank, row: session.row, node: null }),
    });
  }

  update({ frame }) {
    const { chosen, items } = this.list;
    const id = items[chosen]?.session_id;
    const sessions = familyOrder(frame.sessions);
    this.list.chosen = sessions.findIndex((session) => session.session_id === id);
    this.list.update(sessions.map((session) => ({ ...session, layout: layoutTurns(session) })));
    const leftOut = frame.num_sessions_left_out;
    setText(byId("sessions-left-out"), leftOut ? `${plural(leftOut, "more session")}` : "");
  }

  draw() {
    this.list.draw();
  }
}

function drawSession(context, session, top, width) {
  const { points, stubs } = session.layout;
  const indent = 8 + 14 * Math.min(6, session.depth);
  const columns = Math.max(1, ...points.map(({ column }) => column + 1));
  const pitch = Math.min(MAX_PITCH, (width - indent - 110) / columns);
  const start = indent + (session.num_left_out ? 44 : 8);
  const x = ({ column }) => start + column * pitch;
  const y = ({ lane }) => top + TEXT_HEIGHT + (lane + 0.5) * LANE_HEIGHT;
  context.fillStyle = theme.ink;
  context.fillText(clip(context, wordsOfSession(session), width - indent - 4), indent, top + 10);
  if (session.num_left_out) {
    context.fillText(`+${count(session.num_left_out)}`, indent, y({ lane: 0 }));
  }
  context.lineWidth = 2;
  context.strokeStyle = BLUE;
  for (const point of points) {
    if (point.parent) branch(context, x(point.parent), y(point.parent), x(point), y(point));
  }
  if (session.depth > 0 && points.length) {
    const last = points.findLast((point) => point.isShared) ?? points[0];
    branch(context, x(last), top + TEXT_HEIGHT - 2, x(last), y(last));
  }
  for (const point of points) {
    context.beginPath();
    context.arc(x(point), y(point), Math.min(DOT, Math.max(1.5, pitch / 3)), 0, 2 * Math.PI);
    context.fillStyle = point.isShared ? theme.surface : BLUE;
    context.fill();
    context.stroke();
  }
  context.strokeStyle = VERMILION;
  context.fillStyle = theme.ink;
  context.setLineDash([3, 3]);
  for (const stub of stubs) {
    const from = points.findLast((point) => point.column <= stub.column && point.lane === 0);
    const [fromX, fromY] = [x(stub), y(from ?? { lane: 0 })];
    branch(context, fromX, fromY, fromX + 16, y(stub));
    context.fillText(`× ${stub.words}`, fromX + 20, y(stub));
  }
  context.setLineDash([]);
}

function branch(context, fromX, fromY, toX, toY) {
  context.beginPath();
  context.moveTo(fromX, fromY);
  context.bezierCurveTo(fromX, toY, fromX, toY, toX, toY);
  context.stroke();
}
