// Vercel's AI SDK: its provider for servers like this one, and its default for OpenAI, which asks for responses.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";
import { assert, needsResponses, order, run, scene, weather } from "./scene.mjs";

const parameters = { ...scene.tool.function.parameters, additionalProperties: false };
const tools = { weather: tool({ inputSchema: jsonSchema(parameters), execute: async (input) => weather(input) }) };
const user = { role: "user", content: scene.question };
// With store true, its default, the provider for OpenAI names earlier items by references, which need a store.
const providerOptions = { openai: { store: false } };
const steps = { tools, stopWhen: stepCountIs(3), maxRetries: 0, providerOptions };

const chat = (baseURL) =>
  createOpenAICompatible({ name: "specdec", baseURL, supportsStructuredOutputs: true })(scene.model);

async function loop(model) {
  const answer = await generateText({ model, messages: [user], ...steps });
  assert.equal(answer.text, scene.called_answer);
  const messages = [user, ...answer.response.messages, { role: "user", content: scene.thanks }];
  assert.equal((await generateText({ model, messages, ...steps })).text, scene.second_answer);
  return answer;
}

await run("ai", {
  async "tool loop and second turn"() {
    const answer = await loop(chat(scene.scripted));
    assert.ok(answer.steps[0].reasoningText, "without its reasoning");
  },
  async streams() {
    const answer = streamText({ model: chat(scene.scripted), messages: [user], ...steps });
    let text = "";
    for await (const piece of answer.textStream) text += piece;
    assert.equal(text, scene.called_answer);
  },
  async "structured output"() {
    const request = { model: chat(scene.demo), prompt: scene.order, maxOutputTokens: 200, maxRetries: 0 };
    order.parse((await generateText({ ...request, output: Output.object({ schema: order }) })).output);
  },
  async responses() {
    await needsResponses();
    await loop(createOpenAI({ baseURL: scene.scripted, apiKey: "any" })(scene.model));
  },
});
