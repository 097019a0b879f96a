// llama.cpp through node-llama-cpp, one sequence: node worker_llama.mjs NODE_MODULES FILE.gguf THREADS
// The lines are those of lines.py.

import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const [modules, modelPath, threadsText] = process.argv.slice(2);
const { getLlama } = await import(pathToFileURL(`${modules}/node-llama-cpp/dist/index.js`));
const { version } = JSON.parse(readFileSync(`${modules}/node-llama-cpp/package.json`, "utf8"));

const threads = Number(threadsText);
const llama = await getLlama({ gpu: false, build: "never", maxThreads: threads, logLevel: "error" });
const model = await llama.loadModel({ modelPath });
const context = await model.createContext({ contextSize: 4096, threads });
const sequence = context.getSequence();

async function ask({ prompts: [prompt], num_tokens: numTokens }) {
  const began = performance.now();
  let first = null;
  const ids = [];
  await sequence.clearHistory();
  for await (const id of sequence.evaluate(prompt, { temperature: 0, yieldEogToken: true })) {
    first ??= performance.now();
    ids.push(id);
    if (ids.length === numTokens) break;
  }
  const ended = performance.now();
  return { seconds: (ended - began) / 1000, first_s: (first - began) / 1000, texts: [ids] };
}

console.log(JSON.stringify({ name: `llama.cpp, node-llama-cpp ${version}` }));
for await (const line of createInterface({ input: process.stdin })) {
  console.log(JSON.stringify(await ask(JSON.parse(line))));
}
process.exit(0);
