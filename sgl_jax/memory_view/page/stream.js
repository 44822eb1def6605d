/** Follows the server of the page: its facts, then the stream of its events. */

import { Api, eventsOf } from "./api.js";

const SILENCE_MS = 60_000; // the server sends comments more often than that
const MAX_WAIT_S = 30;
const api = new Api("memory-view-key");
const urlOf = (path) => new URL(path, import.meta.url);

export const rememberKey = (key) => api.keepKey(key);

/** The JSON value that `path` (below /memory/) returns; POST if there is a `body`. */
export async function ask(path, body, signal) {
  const response = await api.request(urlOf(path), body, signal);
  return response.json();
}

async function* events() {
  const silence = new AbortController();
  let timer = null;
  const onPiece = () => {
    clearTimeout(timer);
    timer = setTimeout(() => silence.abort(new Error("the server is silent")), SILENCE_MS);
  };
  onPiece();
  try {
    yield* eventsOf(await api.request(urlOf("events"), null, silence.signal), onPiece);
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
