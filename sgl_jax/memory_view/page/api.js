/** Requests to the server of a page, and the events of a streamed answer. */

/** Requests with the key that the reader typed, which stays in this tab under `keyName`. */
export class Api {
  #keyName;

  constructor(keyName) {
    this.#keyName = keyName;
  }

  get hasKey() {
    return sessionStorage.getItem(this.#keyName) !== null;
  }

  keepKey(key) {
    sessionStorage.setItem(this.#keyName, key);
  }

  dropKey() {
    sessionStorage.removeItem(this.#keyName);
  }

  /** The answer to a GET, or to a POST if there is a `body`. An error has the `status`. */
  async request(url, body, signal) {
    const headers = {};
    const key = sessionStorage.getItem(this.#keyName);
    if (key) headers.Authorization = `Bearer ${key}`;
    const options = { headers, signal, cache: "no-store" };
    if (body) {
      headers["Content-Type"] = "application/json";
      Object.assign(options, { method: "POST", body: JSON.stringify(body) });
    }
    const response = await fetch(url, options);
    if (response.ok) return response;
    const answer = await response.json().catch(() => null);
    const message = answer?.error?.message ?? `the server returned status ${response.status}`;
    throw serverError(message, response.status);
  }
}

export const serverError = (message, status) => Object.assign(new Error(message), { status });

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

/** The events of an answer; `onPiece` is called whenever something arrives. */
export async function* eventsOf(response, onPiece = () => {}) {
  const parser = new EventParser();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    onPiece();
    yield* parser.feed(value);
  }
}
