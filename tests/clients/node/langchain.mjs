// What @langchain/openai gets from the server at process.argv[2], by chats and responses, as JSON.
import { tool } from "@langchain/core/tools";
import { createReactAgent } from "@langchain/langgraph/prebuilt";
import { ChatOpenAI, OpenAI } from "@langchain/openai";
import { z } from "zod";

const configuration = { baseURL: `${process.argv[2]}/v1` };
const common = { model: "demo", apiKey: "none", temperature: 0, maxRetries: 0, configuration };
const sum = "What is 17 + 25?";
const weather = "What is the weather in Paris?";
const schema = z.object({ left: z.number().int(), isSure: z.boolean() });
const getWeather = tool(async () => JSON.stringify({ weather: "rainy", degrees: 12 }), {
  name: "get_weather",
  description: "The weather in a city now.",
  schema: z.object({ city: z.string() }),
});
const keys = (object) => Object.keys(object).sort().join();

async function joined(stream) {
  let whole = null;
  for await (const chunk of stream) whole = whole ? whole.concat(chunk) : chunk;
  return whole;
}

async function ask(useResponsesApi) {
  const model = new ChatOpenAI({ ...common, maxTokens: 200, useResponsesApi });
  const strict = model.bindTools([getWeather], { strict: true });
  const named = model.bindTools([getWeather], { tool_choice: "get_weather" });
  const agent = createReactAgent({ llm: model, tools: [getWeather], responseFormat: schema });
  const state = await agent.invoke({ messages: [["user", weather]] });
  const objects = {};
  for (const method of ["jsonSchema", "functionCalling"]) {
    const typed = model.withStructuredOutput(schema, { method, name: "sum" });
    objects[method] = keys(await typed.invoke(sum));
  }
  const streamed = await joined(await model.stream(sum));
  return {
    whole: (await model.invoke(sum)).text,
    streamed: streamed.text,
    hasUsage: streamed.usage_metadata.output_tokens > 0,
    called: (await strict.invoke(weather)).tool_calls[0].args,
    calledStream: (await joined(await strict.stream(weather))).tool_calls[0].args,
    forced: (await named.invoke("Hi")).tool_calls[0].name,
    ...objects,
    report: state.messages.at(-1).text,
    typed: keys(state.structuredResponse),
  };
}

const text = new OpenAI({ ...common, maxTokens: 20 });
const prompt = `<|im_start|>user\n${sum}<|im_end|>\n<|im_start|>assistant\n`;
console.log(
  JSON.stringify({
    chats: await ask(false),
    responses: await ask(true),
    completion: await text.invoke(prompt),
  }),
);
