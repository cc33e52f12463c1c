// What scene.py is for the clients in Python. Its values come as JSON by the environment.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { z } from "zod";

export const scene = JSON.parse(process.env.SCENE);
export const order = z.object({ count: z.number().int().min(0).max(99), express: z.boolean() });
export const weather = ({ city }) => `21 degrees in ${city}`;

class Skipped extends Error {}

export async function needsResponses() {
  const body = JSON.stringify({ model: scene.model, input: "Hello." });
  const headers = { "Content-Type": "application/json" };
  const answer = await fetch(`${scene.scripted}/responses`, { method: "POST", headers, body });
  if (answer.status === 404) throw new Skipped("the server answers 404 to /v1/responses");
}

export async function run(name, checks) {
  console.log(`version\t${JSON.parse(readFileSync(new URL(`node_modules/${name}/package.json`, import.meta.url))).version}`);
  for (const [check, ask] of Object.entries(checks)) {
    const result = await ask().then(
      () => "ok",
      (error) => `${error instanceof Skipped ? "skipped" : "failed"}: ${error.message}`.replaceAll("\n", " "),
    );
    console.log(`${check}\t${result}`);
  }
}

export { assert };
