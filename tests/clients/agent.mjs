// What npm's openai gets from the server at process.argv[2], as one line of JSON.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const sum = [{ role: "user", content: "What is 17 + 25?" }];
const weather = [{ role: "user", content: "What is the weather in Paris?" }];
const parameters = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
const ask = (body) => client.chat.completions.create({ model: "demo", temperature: 0, ...body });

const whole = (await ask({ messages: sum })).choices[0].message.content;

let streamed = "";
let usage = null;
for await (const chunk of await ask({
  messages: sum,
  stream: true,
  stream_options: { include_usage: true },
})) {
  streamed += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}

const schema = {
  type: "object",
  properties: { sure: { type: "boolean" } },
  required: ["sure"],
  additionalProperties: false,
};
const format = { type: "json_schema", json_schema: { name: "sure", strict: true, schema } };
const held = (await ask({ messages: sum, response_format: format })).choices[0].message.content;

// The client's own loop: it calls the function, sends its result, and asks again.
const runner = client.chat.completions.runTools({
  model: "demo",
  temperature: 0,
  messages: weather,
  tools: [
    {
      type: "function",
      function: {
        name: "get_weather",
        parameters,
        parse: JSON.parse,
        function: ({ city }) => JSON.stringify({ weather: "rainy", degrees: city.length }),
      },
    },
  ],
});
const report = await runner.finalContent();

const stream = client.chat.completions.stream({
  model: "demo",
  messages: sum,
  tools,
  tool_choice: "required",
  temperature: 0,
});
const forced = (await stream.finalChatCompletion()).choices[0].message.tool_calls[0];

let refused = null;
try {
  await ask({ messages: sum, top_p: 5 });
} catch (error) {
  refused = { status: error.status, param: error.param };
}

const names = [];
for await (const model of client.models.list()) names.push(model.id);

console.log(
  JSON.stringify({
    whole,
    streamed,
    hasUsage: usage.completion_tokens > 0,
    held: typeof JSON.parse(held).sure,
    report,
    forced: [forced.function.name, typeof JSON.parse(forced.function.arguments).city],
    refused,
    names,
  }),
);
