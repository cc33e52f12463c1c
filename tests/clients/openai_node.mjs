// OpenAI's client for JavaScript.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { assert, needsResponses, order, run, scene, weather } from "./scene.mjs";

const client = (baseURL) => new OpenAI({ baseURL, apiKey: "any", maxRetries: 0 });
const { model, tool } = scene;
const user = { role: "user", content: scene.question };

await run("openai", {
  async "tool loop and second turn"() {
    const messages = [user];
    for (const expected of ["", scene.called_answer, scene.second_answer]) {
      const answer = await client(scene.scripted).chat.completions.create({ model, messages, tools: [tool] });
      const { message } = answer.choices[0];
      assert.equal(message.content ?? "", expected);
      assert.ok(message.reasoning, "without its reasoning");
      messages.push(message);
      for (const call of message.tool_calls ?? []) {
        const content = weather(JSON.parse(call.function.arguments));
        messages.push({ role: "tool", tool_call_id: call.id, content });
      }
      if (expected) messages.push({ role: "user", content: scene.thanks });
    }
  },
  async streams() {
    const request = { model, messages: [user], tools: [tool] };
    const answer = await client(scene.scripted).chat.completions.stream(request).finalChatCompletion();
    const [call] = answer.choices[0].message.tool_calls;
    assert.deepEqual(JSON.parse(call.function.arguments), { city: "Bern" });
  },
  async "structured output"() {
    const messages = [{ role: "user", content: scene.order }];
    const response_format = zodResponseFormat(order, "order");
    const request = { model, messages, response_format, max_tokens: 200 };
    const answer = await client(scene.demo).chat.completions.parse(request);
    order.parse(answer.choices[0].message.parsed);
  },
  async responses() {
    await needsResponses();
    const input = [user];
    const tools = [{ type: "function", strict: false, ...tool.function }];
    for (const expected of ["", scene.called_answer, scene.second_answer]) {
      const answer = await client(scene.scripted).responses.create({ model, input, tools, store: false });
      assert.equal(answer.output_text, expected);
      input.push(...answer.output);
      for (const { call_id, arguments: given } of answer.output.filter((item) => item.type === "function_call")) {
        input.push({ type: "function_call_output", call_id, output: weather(JSON.parse(given)) });
      }
      if (expected) input.push({ role: "user", content: scene.thanks });
    }
  },
});
