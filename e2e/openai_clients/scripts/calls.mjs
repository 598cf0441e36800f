// What the scripts of Node clients share: one JSON line per call, and the facts of the image.
import { readFileSync } from "node:fs";

export const URL = process.env.BASE_URL; // of the gateway, with /v1
export const MODEL = process.env.MODEL;
export const IMAGE = readFileSync(process.env.IMAGE);
export const IMAGE_URL = "data:image/png;base64," + IMAGE.toString("base64");
export const QUESTION = "What shape is yellow?";
export const ANSWER = "square";
export const USER = {
  role: "user",
  content: [
    { type: "image_url", image_url: { url: IMAGE_URL } },
    { type: "text", text: QUESTION },
  ],
};

// Run `check`, and print whether it threw.
export async function call(name, check) {
  let error = null;
  try {
    await check();
  } catch (thrown) {
    console.error(thrown);
    error = String(thrown).slice(0, 300);
  }
  console.log(JSON.stringify({ call: name, error }));
}
