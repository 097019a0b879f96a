// A client in another language: streams one answer and prints each message as a line of JSON, then
// the status. Usage: node client.mjs <folder that holds protos/> <address> <request> [cancel after]

import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const [root, address, request, cancelAfter] = process.argv.slice(2);
const definition = protoLoader.loadSync("protos/outrider/v1/inference.proto", {
  includeDirs: [root],
  keepCase: true,
  longs: String,
  enums: String,
  defaults: true,
  oneofs: true,
});
const { Inference } = grpc.loadPackageDefinition(definition).outrider.v1;
const client = new Inference(address, grpc.credentials.createInsecure());
const call = client.Generate(JSON.parse(request), { deadline: Date.now() + 30_000 });
let messages = 0;

call.on("data", (message) => {
  console.log(JSON.stringify(message));
  messages += 1;
  if (messages === Number(cancelAfter)) call.cancel();
});
// The status follows as an event of its own; without a listener an error would end the process.
call.on("error", () => {});
call.on("status", (status) => {
  const details = status.metadata.get("grpc-status-details-bin").map((each) => each.toString("base64"));
  console.log(JSON.stringify({ status: { code: status.code, details: status.details, bin: details } }));
  client.close();
});
