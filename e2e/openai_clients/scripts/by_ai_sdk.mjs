// Vercel's AI SDK with its OpenAI-compatible provider, and with its OpenAI provider (responses).
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { ANSWER, IMAGE, MODEL, QUESTION, URL, call } from "./calls.mjs";

const compatible = createOpenAICompatible({
  name: "triptych",
  baseURL: URL,
  apiKey: "none",
  supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL: URL, apiKey: "none" });
const MODELS = {
  "openai-compatible": compatible(MODEL),
  "openai, chat": openai.chat(MODEL),
  "openai, responses": openai.responses(MODEL),
};
const Seen = z.object({ color: z.enum(["red", "blue"]) });
const messages = [
  {
    role: "user",
    content: [
      { type: "image", image: IMAGE, mediaType: "image/png" },
      { type: "text", text: QUESTION },
    ],
  },
];

for (const [name, model] of Object.entries(MODELS)) {
  const given = { model, messages, temperature: 0, maxRetries: 0, maxOutputTokens: 700 };

  await call(`generateText, an image (${name})`, async () => {
    assert.equal((await generateText(given)).text, ANSWER);
  });

  await call(`streamText (${name})`, async () => {
    let text = "";
    for await (const piece of streamText(given).textStream) text += piece;
    assert.equal(text, ANSWER);
  });

  await call(`Output.object (${name})`, async () => {
    const { output } = await generateText({ ...given, output: Output.object({ schema: Seen }) });
    Seen.parse(output);
  });

  await call(`a tool and the step behind it (${name})`, async () => {
    const noted = [];
    const note = tool({
      description: "Note a colour.",
      inputSchema: Seen,
      execute: async ({ color }) => {
        noted.push(color);
        return `noted ${color}`;
      },
    });
    await generateText({
      ...given,
      tools: { note },
      toolChoice: "required",
      prepareStep: ({ stepNumber }) => (stepNumber > 0 ? { toolChoice: "none" } : {}),
      stopWhen: stepCountIs(2),
    });
    assert.equal(noted.length, 1);
  });
}
