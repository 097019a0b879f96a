// Load on the gRPC port: many clients at once, each reading streams of Inference.Generate to their
// ends. k6 fails (status 99) when a stream ends without its finish or a threshold is missed.
//
//   k6 run --no-usage-report -e ADDRESS=127.0.0.1:50051 -e PROTOS=. tests/clients/k6/generate.js
//
// PROTOS is the folder that holds protos/. Others: CLIENTS, REQUESTS (of all clients together),
// MAX_TOKENS, API_KEY, FIRST_TOKEN_MS (limit of the 95th percentile).
import { Client, Stream, StatusOK } from 'k6/net/grpc';
import { Counter, Rate, Trend } from 'k6/metrics';

const number = (name, otherwise) => Number(__ENV[name] || otherwise);
const ADDRESS = __ENV.ADDRESS || '127.0.0.1:50051';
const MAX_TOKENS = number('MAX_TOKENS', 64);

const failed = new Rate('failed');
const tokens = new Counter('tokens');
const firstToken = new Trend('time_to_first_token', true);
const between = new Trend('time_between_chunks', true);

export const options = {
  scenarios: {
    generate: {
      executor: 'shared-iterations',
      vus: number('CLIENTS', 32),
      iterations: number('REQUESTS', 128),
      maxDuration: '10m',
    },
  },
  thresholds: {
    failed: ['rate==0'],
    time_to_first_token: [`p(95)<${number('FIRST_TOKEN_MS', 1000)}`],
  },
  summaryTrendStats: ['med', 'p(95)', 'p(99)', 'max'],
};

const client = new Client();
client.load([__ENV.PROTOS || '.'], 'protos/outrider/v1/inference.proto');
let connected = false;

export default function () {
  if (!connected) {
    client.connect(ADDRESS, { plaintext: true });
    connected = true;
  }
  return new Promise((resolve) => {
    const metadata = __ENV.API_KEY ? { authorization: `Bearer ${__ENV.API_KEY}` } : {};
    const stream = new Stream(client, 'outrider.v1.Inference/Generate', { metadata });
    const started = Date.now();
    let last = 0;
    let numTokens = 0;
    let finish = null;
    let error = null;
    stream.on('data', (message) => {
      if (message.finish) {
        finish = message.finish;
        return;
      }
      const now = Date.now();
      numTokens += (message.chunk.tokens || []).length;
      (last ? between : firstToken).add(now - (last || started));
      last = now;
    });
    stream.on('error', (reason) => {
      error = reason;
    });
    stream.on('end', () => {
      const whole = finish !== null && finish.usage.completionTokens === numTokens;
      const good = whole && (error === null || error.code === StatusOK);
      if (!good) {
        console.error(JSON.stringify({ error, finish, numTokens }));
      }
      failed.add(!good);
      tokens.add(numTokens);
      resolve();
    });
    stream.write({
      chat: { messages: [{ role: 'user', content: `Tell me a story about ${__ITER} foxes.` }] },
      stopping: { maxTokens: MAX_TOKENS, ignoreEos: true },
    });
    stream.end();
  });
}

export function handleSummary(data) {
  const values = {};
  for (const [name, metric] of Object.entries(data.metrics)) {
    values[name] = metric.values;
  }
  return { stdout: `${JSON.stringify(values)}\n` };
}
