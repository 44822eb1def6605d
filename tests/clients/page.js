// A page that asks the server named in its address, on another origin, through npm's openai, and
// posts what it got to the origin that it came from.

import OpenAI from "openai";

const client = new OpenAI({
  baseURL: new URLSearchParams(location.search).get("server") + "/v1",
  apiKey: "none",
  dangerouslyAllowBrowser: true,
  maxRetries: 0,
});
const asked = {
  model: "demo",
  messages: [{ role: "user", content: "What is 17 + 25?" }],
  temperature: 0,
};

async function ask() {
  const whole = await client.chat.completions.create(asked);
  let streamed = "";
  for await (const event of await client.chat.completions.create({ ...asked, stream: true })) {
    streamed += event.choices[0]?.delta?.content ?? "";
  }
  const refused = await client.chat.completions
    .create({ ...asked, top_p: 5 })
    .catch((error) => ({ status: error.status, param: error.param }));
  return { whole: whole.choices[0].message.content, streamed, refused };
}

const result = await ask().catch((error) => ({ error: error.constructor.name }));
await fetch("/result", { method: "POST", body: JSON.stringify(result) });
