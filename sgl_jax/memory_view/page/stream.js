/** Requests to the server of the page, and the stream of its events. */

const KEY_NAME = "memory-view-key";
const SILENCE_MS = 60_000; // the server sends comments more often than that
const MAX_WAIT_S = 30;

export const rememberKey = (key) => sessionStorage.setItem(KEY_NAME, key);

/** The JSON value that `path` (below /memory/) returns; POST if there is a `body`. */
export async function ask(path, body, signal) {
  const response = await request(path, body, signal);
  return response.json();
}

async function request(path, body, signal) {
  const headers = {};
  const key = sessionStorage.getItem(KEY_NAME);
  if (key) headers.Authorization = `Bearer ${key}`;
  const options = { headers, signal, cache: "no-store" };
  if (body) {
    headers["Content-Type"] = "application/json";
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  }
  const response = await fetch(new URL(path, import.meta.url), options);
  if (response.ok) return response;
  const answer = await response.json().catch(() => null);
  const message = answer?.error?.message ?? `the server returned ${response.status}`;
  throw Object.assign(new Error(message), { status: response.status });
}

/** Events of a text/event-stream that arrives in any pieces: `feed` returns the complete ones. */
export class EventParser {
  #rest = "";

  feed(piece) {
    const blocks = (this.#rest + piece.replaceAll("\r", "")).split("\n\n");
    this.#rest = blocks.pop();
    return blocks.map(parseBlock).filter((event) => event.data);
  }
}

function parseBlock(block) {
  const event = { name: "message", data: "" };
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) event.name = line.slice(6).trim();
    if (line.startsWith("data:")) event.data += line.slice(5).trim();
  }
  return event;
}

async function* events() {
  const silence = new AbortController();
  const giveUp = () => silence.abort(new Error("the server is silent"));
  let timer = setTimeout(giveUp, SILENCE_MS);
  try {
    const response = await request("events", null, silence.signal);
    const parser = new EventParser();
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      clearTimeout(timer);
      timer = setTimeout(giveUp, SILENCE_MS);
      yield* parser.feed(value);
    }
  } finally {
    clearTimeout(timer);
    silence.abort();
  }
}

/** Seconds before the next attempt: 1, 2, 4 ... 30. */
export const backoff = (failures) => Math.min(MAX_WAIT_S, 2 ** failures);

/** Follows the server for ever; a recording ends it after `onHello`.
 *
 * `on.hello(hello)`, `on.event(name, value)`, `on.lost(message, seconds until the next attempt)`,
 * and `on.key()`, a promise that a key was entered. */
export async function follow(on) {
  for (let failures = 0; ; ) {
    try {
      const hello = await ask("hello");
      on.hello(hello);
      if (hello.is_recording) return;
      for await (const { name, data } of events()) {
        on.event(name, JSON.parse(data));
        failures = 0;
      }
      throw new Error("the server ended the stream");
    } catch (error) {
      if (error.status === 401) {
        await on.key();
        continue;
      }
      const seconds = backoff(failures++);
      on.lost(error.message, seconds);
      await new Promise((resume) => setTimeout(resume, 1000 * seconds));
    }
  }
}
