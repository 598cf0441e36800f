// The official Node client, with its own helpers.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { ANSWER, IMAGE_URL, MODEL, QUESTION, URL, USER, call } from "./calls.mjs";

const client = new OpenAI({ baseURL: URL, apiKey: "none", maxRetries: 0 });
const Seen = z.object({ color: z.enum(["red", "blue"]), count: z.number().int().min(0).max(9) });
const INPUT = [
  {
    role: "user",
    content: [
      { type: "input_image", image_url: IMAGE_URL, detail: "auto" },
      { type: "input_text", text: QUESTION },
    ],
  },
];

await call("models.list", async () => {
  const ids = [];
  for await (const model of client.models.list()) ids.push(model.id);
  assert.deepEqual(ids, [MODEL]);
});

await call("chat.completions.create, an image", async () => {
  const reply = await client.chat.completions.create({ model: MODEL, messages: [USER], temperature: 0 });
  assert.equal(reply.choices[0].message.content, ANSWER);
});

await call("chat.completions.stream", async () => {
  const stream = client.chat.completions.stream({ model: MODEL, messages: [USER], temperature: 0 });
  assert.equal(await stream.finalContent(), ANSWER);
});

await call("chat.completions.parse, a zod schema", async () => {
  const reply = await client.chat.completions.parse({
    model: MODEL,
    messages: [USER],
    response_format: zodResponseFormat(Seen, "seen"),
    max_tokens: 700,
  });
  Seen.parse(reply.choices[0].message.parsed);
});

await call("chat.completions.runTools", async () => {
  const noted = [];
  const runner = client.chat.completions.runTools(
    {
      model: MODEL,
      messages: [USER],
      max_tokens: 700,
      temperature: 0,
      tool_choice: { type: "function", function: { name: "note" } },
      tools: [
        {
          type: "function",
          function: {
            name: "note",
            description: "Note a colour.",
            parameters: {
              type: "object",
              properties: { color: { type: "string", enum: ["red", "blue"] } },
              required: ["color"],
              additionalProperties: false,
            },
            parse: JSON.parse,
            function: ({ color }) => {
              noted.push(color);
              return `noted ${color}`;
            },
          },
        },
      ],
    },
    { maxChatCompletions: 3 },
  );
  await runner.done();
  assert.equal(noted.length, 1);
});

await call("responses.create, an image", async () => {
  const reply = await client.responses.create({ model: MODEL, input: INPUT, temperature: 0 });
  assert.equal(reply.output_text, ANSWER);
});

await call("responses.stream", async () => {
  const stream = client.responses.stream({ model: MODEL, input: INPUT, temperature: 0 });
  const reply = await stream.finalResponse();
  assert.equal(reply.output_text, ANSWER);
});

await call("responses.parse, a zod schema", async () => {
  const reply = await client.responses.parse({
    model: MODEL,
    input: INPUT,
    text: { format: zodTextFormat(Seen, "seen") },
    max_output_tokens: 700,
  });
  Seen.parse(reply.output_parsed);
});

await call("an error names its parameter", async () => {
  await assert.rejects(
    client.chat.completions.create({ model: MODEL, messages: [USER], temperature: 9 }),
    (error) => error.status === 400 && error.param === "temperature",
  );
});
