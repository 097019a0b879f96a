// Asks a gateway one question and prints the answer as it comes.
//
//   npm ci --ignore-scripts
//   node chat.mjs "What is speculative decoding?"
//
// OUTRIDER_ADDRESS is the gateway (127.0.0.1:50051), OUTRIDER_API_KEY a key if it asks for one,
// OUTRIDER_TLS_CA the file of its certificate authority if it speaks TLS, OUTRIDER_TLS_CERT and
// OUTRIDER_TLS_KEY what to show it if it asks for a certificate, and OUTRIDER_PROTOS the folder that
// holds protos/ (the root of the repository).

import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const env = process.env;
const root = env.OUTRIDER_PROTOS ?? fileURLToPath(new URL("../../..", import.meta.url));
const definition = protoLoader.loadSync("protos/outrider/v1/inference.proto", {
  includeDirs: [root],
  keepCase: true,
  longs: String, // a seed has 64 bits, more than a number of JavaScript holds
  enums: String,
  defaults: true,
  oneofs: true,
});
const { Inference } = grpc.loadPackageDefinition(definition).outrider.v1;
const file = (name) => (env[name] ? readFileSync(env[name]) : null);
const client = new Inference(
  env.OUTRIDER_ADDRESS ?? "127.0.0.1:50051",
  env.OUTRIDER_TLS_CA
    ? grpc.credentials.createSsl(
        file("OUTRIDER_TLS_CA"),
        file("OUTRIDER_TLS_KEY"),
        file("OUTRIDER_TLS_CERT"),
      )
    : grpc.credentials.createInsecure(),
);
const metadata = new grpc.Metadata();
if (env.OUTRIDER_API_KEY) metadata.set("authorization", `Bearer ${env.OUTRIDER_API_KEY}`);

const request = {
  chat: { messages: [{ role: "user", content: process.argv[2] ?? "What is a draft model?" }] },
  sampling: { temperature: 0 },
  stopping: { max_tokens: 64 },
};
const call = client.Generate(request, metadata, { deadline: Date.now() + 60_000 });
process.on("SIGINT", () => call.cancel()); // the gateway stops working on it at once

try {
  for await (const { chunk, finish } of call) {
    if (chunk) process.stdout.write(chunk.text);
    if (finish) {
      const { drafted, accepted } = finish.speculation;
      console.log(`\n[${finish.reason}; seed ${finish.seed}; ${accepted} of ${drafted} drafts stood]`);
    }
  }
} catch (error) {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
} finally {
  client.close();
}
