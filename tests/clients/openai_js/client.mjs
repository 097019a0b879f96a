// Jobs for the `openai` package, all at once; prints what came of each, a line of JSON a job.
//
//   node client.mjs BASE_URL '[{"call": "chat", "body": {...}, "leaveAfter": 3}, ...]'
//
// call: chat, completions, models or model. leaveAfter: leave a stream after so many chunks.
import OpenAI from 'openai';

const [baseURL, jobs] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: 'none', maxRetries: 0 });

const CALLS = {
  chat: (body) => client.chat.completions.create(body),
  completions: (body) => client.completions.create(body),
  models: async () => (await client.models.list()).data,
  model: (name) => client.models.retrieve(name),
};

async function run({ call, body, leaveAfter }) {
  const chunks = [];
  try {
    const answer = await CALLS[call](body);
    if (!body?.stream) {
      return { answer };
    }
    for await (const chunk of answer) {
      chunks.push(chunk);
      if (chunks.length === leaveAfter) {
        break; // the package ends the request
      }
    }
    return { chunks };
  } catch (error) {
    const { status, code, param, message } = error;
    const retryAfter = error.headers?.get('retry-after');
    return { chunks, error: { name: error.constructor.name, status, code, param, message, retryAfter } };
  }
}

for (const result of await Promise.all(JSON.parse(jobs).map(run))) {
  console.log(JSON.stringify(result));
}
