// A conversation with the model over the server's own API. Text of the model and of errors goes to
// text nodes alone, never into markup.

import { Api, eventsOf, serverError } from "./memory/api.js";
import { TokenChart } from "./token_chart.js";

const api = new Api("sgl_jax_api_key");
const element = (id) => document.getElementById(id);
const chart = new TokenChart(element);

let history = []; // messages: { role, content }
let running = null; // the AbortController of the answer under way
let isBase = false; // the model has no chat template: it continues a text
let retry = null; // to call again with a key

// -- the API

// The objects of a stream of server-sent events, up to [DONE].
async function* answersOf(response) {
  for await (const { data } of eventsOf(response)) {
    if (data === "[DONE]") {
      return;
    }
    yield JSON.parse(data);
  }
}

function request() {
  const system = element("system").value.trim();
  const messages = system ? [{ role: "system", content: system }, ...history] : history;
  const body = {
    model: "default",
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  const temperature = element("temperature").value;
  const maxTokens = element("max-tokens").value;
  if (temperature !== "") {
    body.temperature = Number(temperature);
  }
  if (maxTokens !== "") {
    body.max_tokens = Number(maxTokens);
  }
  if (isBase) {
    body.prompt = messages.map((message) => message.content).join("");
    return ["/v1/completions", body];
  }
  return ["/v1/chat/completions", { ...body, messages }];
}

// -- the page

function notify(text, isError = false) {
  const notice = element("notice");
  notice.textContent = text;
  notice.classList.toggle("error", isError);
  notice.hidden = text === "";
}

function addArticle(role) {
  const article = document.createElement("article");
  const heading = document.createElement("h2");
  article.className = role;
  heading.textContent = role === "user" ? "You" : "Model";
  article.append(heading);
  element("log").append(article);
  return article;
}

// Append to the article's last paragraph of that class, or begin one.
function appendText(article, kind, text) {
  const log = element("log");
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  let paragraph = article.lastElementChild;
  if (paragraph.tagName !== "P" || paragraph.className !== kind) {
    paragraph = document.createElement("p");
    paragraph.className = kind;
    paragraph.append(document.createTextNode(""));
    article.append(paragraph);
  }
  paragraph.firstChild.appendData(text);
  if (isAtEnd) {
    log.scrollTop = log.scrollHeight;
  }
}

function setRunning(controller) {
  running = controller;
  element("send").disabled = controller !== null;
  element("stop").disabled = controller === null;
  element("log").setAttribute("aria-busy", String(controller !== null));
}

// -- the conversation

// Stream one answer into `answer`; returns its content.
async function stream(answer, controller) {
  const [path, body] = request();
  chart.start();
  const response = await api.request(path, body, controller.signal);
  let numTokens = 0;
  for await (const event of answersOf(response)) {
    if (event.error) {
      throw serverError(event.error.message, 0);
    }
    if (event.usage) {
      chart.add(event.usage.completion_tokens - numTokens);
      numTokens = event.usage.completion_tokens;
      chart.showUsage(event.usage);
      element("figures").hidden = false;
    }
    const choice = event.choices[0];
    const reasoning = choice?.delta?.reasoning_content;
    const text = choice?.delta?.content ?? choice?.text;
    if (reasoning) {
      appendText(answer.article, "reasoning", reasoning);
    }
    if (text) {
      answer.content += text;
      appendText(answer.article, "content", text);
    }
  }
}

async function send(text) {
  notify("");
  history.push({ role: "user", content: text });
  const question = addArticle("user");
  appendText(question, "content", text);
  const answer = { article: addArticle("assistant"), content: "" };
  element("log").scrollTop = element("log").scrollHeight;
  const controller = new AbortController();
  setRunning(controller);
  const conversation = history;
  try {
    await stream(answer, controller);
  } catch (error) {
    if (history !== conversation) {
      return; // reset meanwhile
    }
    if (error.name !== "AbortError") {
      showError(error, text);
    }
    if (answer.content === "") {
      // Nothing came: the message goes back to its box.
      history.pop();
      question.remove();
      answer.article.remove();
      element("message").value ||= text;
      return;
    }
  } finally {
    if (running === controller) {
      setRunning(null);
    }
  }
  conversation.push({ role: "assistant", content: answer.content });
}

function showError(error, text) {
  if (error.status === 401) {
    askForKey(error, () => sendAgain(text));
  } else if (error.status === 400 && !isBase && error.message.includes("no chat template")) {
    isBase = true;
    sendAgain(text);
  } else if (error.status !== undefined) {
    notify(error.message, true);
  } else {
    notify(`The server cannot be reached, or the stream broke off: ${error.message}`, true);
  }
}

// After the failed attempt has been taken back.
function sendAgain(text) {
  setTimeout(async () => {
    element("message").value = "";
    const answered = send(text);
    if (isBase) {
      notify("This model has no chat template: it continues your text, without roles.");
    }
    await answered;
  });
}

function askForKey(error, andThen = retry) {
  retry = andThen;
  if (api.hasKey) {
    api.dropKey();
    notify(error.message, true);
  }
  element("key-form").hidden = false;
  element("key").focus();
}

async function showModel() {
  try {
    const models = await (await api.request("/v1/models")).json();
    element("model").textContent = models.data[0].id;
  } catch (error) {
    if (error.status === 401) {
      askForKey(error);
    } else {
      notify(error.message, true);
    }
  }
}

function submitMessage() {
  const text = element("message").value;
  if (text.trim() === "" || running !== null) {
    return;
  }
  element("message").value = "";
  send(text);
}

element("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submitMessage();
});

element("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submitMessage();
  }
});

element("stop").addEventListener("click", () => {
  running?.abort();
  element("message").focus();
});

element("reset").addEventListener("click", () => {
  history = [];
  running?.abort();
  setRunning(null);
  element("log").replaceChildren();
  element("figures").hidden = true;
  notify("");
  element("message").focus();
});

element("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  api.keepKey(element("key").value);
  element("key").value = "";
  element("key-form").hidden = true;
  element("message").focus();
  notify("");
  const again = retry;
  retry = null;
  showModel();
  again?.();
});

showModel();
element("message").focus();
