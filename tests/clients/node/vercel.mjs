// What Vercel's ai gets from the server at process.argv[2], by each of its ways to ask, as JSON.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = `${process.argv[2]}/v1`;
const compatible = createOpenAICompatible({
  name: "sgl",
  baseURL,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL, apiKey: "none" });
const models = {
  compatible: compatible("demo"),
  chat: openai.chat("demo"),
  responses: openai("demo"),
  anthropic: createAnthropic({ baseURL, apiKey: "none" })("demo"),
};
const sum = "What is 17 + 25?";
const weather = "What is the weather in Paris?";
const schema = z.object({ left: z.number().int(), isSure: z.boolean() });
const tools = {
  get_weather: tool({
    description: "The weather in a city now.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => ({ weather: "rainy", degrees: city.length }),
  }),
};
const keys = (object) => Object.keys(object).sort().join();

async function textOf(stream) {
  let text = "";
  for await (const part of stream.fullStream) {
    if (part.type === "error") throw part.error;
    if (part.type === "text-delta") text += part.text;
  }
  return text;
}

async function ask(model) {
  const common = { model, maxRetries: 0, maxOutputTokens: 200, temperature: 0 };
  const calling = { ...common, prompt: weather, tools, stopWhen: stepCountIs(3) };
  const whole = await generateText({ ...common, prompt: sum });
  const stream = streamText({ ...common, prompt: sum, onError() {} });
  const streamed = await textOf(stream);
  const called = await generateText(calling);
  const forced = await generateText({ ...common, prompt: "Hi", tools, toolChoice: "required" });
  const object = streamObject({ ...common, prompt: sum, schema, onError() {} });
  for await (const _ of object.partialObjectStream);
  const output = Output.object({ schema });
  const beside = await generateText({ ...common, prompt: weather, tools, output });
  const told = [{ role: "user", content: "The code of Mira is 471." }];
  const noted = await generateText({ ...common, messages: told });
  const asked = { role: "user", content: "What is the code of Mira?" };
  const recalled = await generateText({
    ...common,
    messages: [...told, ...noted.response.messages, asked],
  });
  return {
    whole: whole.text,
    streamed,
    hasUsage: (await stream.usage).outputTokens === whole.usage.outputTokens,
    called: called.text,
    calledStream: await textOf(streamText({ ...calling, onError() {} })),
    forced: forced.toolCalls[0].toolName,
    object: keys((await generateObject({ ...common, prompt: sum, schema })).object),
    objectStream: keys(await object.object),
    beside: beside.toolCalls[0].toolName,
    recalled: recalled.text,
  };
}

const answers = {};
for (const [name, model] of Object.entries(models)) {
  answers[name] = await ask(model);
}
const stateless = { openai: { store: false, include: ["reasoning.encrypted_content"] } };
const common = { model: models.responses, maxRetries: 0, temperature: 0, providerOptions: stateless };
const report = await generateText({ ...common, prompt: weather, tools, stopWhen: stepCountIs(3) });
console.log(JSON.stringify({ ...answers, stateless: report.text }));
