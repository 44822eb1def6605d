/** Wires the parts of the page: the server's frames go to the state, the state to the drawings. */

import { byId, clockTime, count, duration, rate, setText } from "./format.js";
import { Head } from "./head.js";
import { PageMaps } from "./page_maps.js";
import { HOST_KINDS, KINDS, onTheme } from "./palette.js";
import { Player } from "./recording.js";
import { Sessions } from "./sessions.js";
import { State } from "./state.js";
import { follow, rememberKey } from "./stream.js";
import { Strips, leasesOf } from "./strips.js";
import { LiveTable } from "./tables.js";
import { Timeline } from "./timeline.js";
import { TreeView } from "./tree.js";

let state = null;
let player = null;
let isStale = false;
let version = 0; // of what is shown

const refresh = () => (isStale = true);

function select(selected) {
  if (state) state.selected = selected;
  if (selected?.node != null && selected.row === null) tree.show(selected.dpRank, selected.node);
  refresh();
}

const head = new Head();
const timeline = new Timeline({
  instant: (sample) => {
    state.instant = sample;
    refresh();
  },
  open: (index) => player && index >= 0 && player.goTo(index),
});
const maps = new PageMaps({ select, change: refresh });
const strips = new Strips(select);
const tree = new TreeView(() => {});
const sessions = new Sessions(select);
const drawings = [timeline, maps, strips, tree, sessions];

const namesOf = ({ name }, kind) => [...new Set([name, HOST_KINDS[kind].name ?? name])].join(" / ");
const PAGE_HEADINGS = [...KINDS.map(namesOf), "total"];
const pageCells = (pages) => [...KINDS.map((kind) => count(pages[kind.state])), count(pages.total)];
const tables = [
  new LiveTable("balance", "Pages by rank and pool",
    ["Rank", "Pool", ...PAGE_HEADINGS, "Free rows", "Running rows", "Session rows"],
    (shown) => shown.frame.ranks.flatMap((rank) => rank.pools.map((pool, index) => [
      rank.dp_rank, pool.name, ...pageCells(shown.pagesOf(rank.dp_rank, index)),
      rank.rows.free, rank.rows.running, rank.rows.session,
    ]))),
  new LiveTable("timeline", "Latest instants",
    ["Time", "Step", "Running", "Waiting", "Tokens/s", "Marks"],
    ({ samples }, limit) => samples.slice(-limit).reverse().map((sample) => [
      clockTime(sample.time_s), count(sample.step), count(sample.num_running),
      count(sample.num_waiting), rate(sample.tokens_per_s),
      sample.marks.map((mark) => `${mark.kind} ${count(mark.count)}`).join(", "),
    ])),
  new LiveTable("map", "Pages in order", ["Rank", "First page", "Pages", "Owner"],
    (_, limit) => maps.ranges(limit)),
  new LiveTable("leases", "Running requests",
    ["Rank", "Row", "Request", "Session", "Protected", "Committed", "Allocated", "Prompt", "Output",
      "Tokens/s", "Retracts"],
    ({ frame }, limit) => leasesOf(frame).slice(0, limit).map((lease) => [
      lease.dpRank, lease.row, lease.rid, lease.session_id, count(lease.protected),
      count(lease.committed), count(lease.allocated), count(lease.prompt_len),
      count(lease.num_output), rate(lease.tokens_per_s), lease.num_retractions,
    ])),
  new LiveTable("waiting", "Waiting requests, in order",
    ["Request", "Waits because", "Prompt", "Output", "Retracts", "Priority"],
    ({ frame }) => frame.waiting.map((each) => [
      each.rid, each.reason, count(each.prompt_len), count(each.num_output),
      each.num_retractions, each.priority,
    ]), { isOpen: true }),
  new LiveTable("tree", "Nodes, parents first",
    ["Rank", "Node", "Parent", "Tokens", "Pages", "Locks", "Last access", "Snapshots"],
    ({ tree: shown }, limit) => (shown?.ranks ?? []).flatMap((rank) =>
      rank.nodes.slice(0, limit).map((node) => [
        rank.dp_rank, node.id, node.parent, `${count(node.start)}–${count(node.end)}`,
        node.num_pages.map(count).join(" + "), node.num_locks, count(node.last_access),
        node.snapshots.length,
      ])).slice(0, limit)),
  new LiveTable("sessions", "Sessions",
    ["Session", "Rank", "Row", "Turns", "Tokens", "Pages", "Freed by eviction", "Idle",
      "Forked from", "Turns undone"],
    ({ frame }, limit) => frame.sessions.slice(0, limit).map((session) => [
      session.session_id, session.dp_rank, session.row,
      count(session.turns.length + session.num_left_out), count(session.num_tokens),
      count(session.num_pages), count(session.num_pages_freed_by_eviction),
      session.is_running ? "running" : duration(session.idle_s), session.forked_from?.session_id,
      session.undone.map((each) => `${each.num_turns} after ${each.after_turns}`).join(", "),
    ])),
];

function showConnection(message) {
  setText(byId("connection"), message);
  byId("connection").hidden = !message;
}

function freeze(isWanted) {
  if (player) {
    player.play(!isWanted);
    return;
  }
  if (!state?.frame) return;
  state.freeze(isWanted);
  byId("freeze").ariaPressed = isWanted;
  document.documentElement.dataset.frozen = isWanted;
  setText(byId("freeze"), isWanted ? "Go on (space)" : "Freeze (space)");
  refresh();
}

function startRecording(hello) {
  byId("freeze").hidden = true;
  player = new Player(hello.num_frames, {
    frame: (frame, shownTree) => {
      state.add(frame);
      state.addTree(shownTree);
      showConnection("");
      refresh();
    },
    failure: (message) => showConnection(`The frame could not be loaded: ${message}`),
  });
  player.goTo(0);
}

follow({
  hello: (hello) => {
    if (state) state.renew(hello);
    else state = new State(hello);
    if (hello.is_recording) startRecording(hello);
  },
  event: (name, value) => {
    if (name === "frame") state.add(value);
    if (name === "tree") state.addTree(value);
    if (name === "frame") showConnection("");
    refresh();
  },
  lost: (message, seconds) =>
    showConnection(`No connection: ${message}. The next attempt is in ${seconds} s.`),
  key: () => new Promise((resume) => {
    byId("key-form").hidden = false;
    byId("key").focus();
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      rememberKey(byId("key").value);
      byId("key-form").hidden = true;
      resume();
    };
  }),
});

function updateAll() {
  isStale = false;
  state.show();
  const word = state.instant ? "an instant of the timeline" : state.isFrozen ? "frozen" : "";
  setText(byId("shown"), word && `Shown: ${word}`);
  head.update(state);
  for (const drawing of drawings) drawing.update(state);
  version++;
}

function onAnimation(now) {
  requestAnimationFrame(onAnimation);
  if (!state?.frame && !state?.newest.frame) return;
  if (isStale) updateAll();
  for (const drawing of drawings) drawing.draw(now);
  for (const table of tables) table.update(state, now, version);
}
requestAnimationFrame(onAnimation);

byId("freeze").addEventListener("click", () => freeze(!state?.isFrozen));
addEventListener("keydown", (event) => {
  const typing = event.target.closest("button, select, summary, input:not([type=range])");
  if (event.key !== " " || typing) return;
  event.preventDefault();
  freeze(player ? player.isPlaying : !state?.isFrozen);
});
onTheme(() => {
  timeline.repaint();
  refresh();
});
