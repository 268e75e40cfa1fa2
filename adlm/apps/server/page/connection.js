// Requests to the server that the page comes from. The API key is kept for this tab only, never in the link.

const STORED = "adlm-key";
let key = null;
try { key = sessionStorage.getItem(STORED); } catch { /* storage is disabled */ }

export class RequestError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function setKey(typed) {
  key = typed;
  try { sessionStorage.setItem(STORED, key); } catch { /* storage is disabled */ }
}

const headers = () => ({ "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) });

async function request(path, options) {
  let answer;
  try {
    answer = await fetch(path, { ...options, headers: headers() });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestError(0, "the server does not answer; is `adlm serve` still running?");
  }
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => null);
  throw new RequestError(answer.status, body?.error?.message ?? `the server answered with status ${answer.status}`);
}

export const getJson = async (path) => (await request(path, {})).json();
export const getText = async (path) => (await request(path, {})).text();

const post = (path, body, signal) => request(path, { method: "POST", body: JSON.stringify(body), signal });
export const postJson = async (path, body, signal) => (await post(path, body, signal)).json();

// Call `onEvent` with every server-sent event of the answer, until it is done.
export async function stream(path, body, signal, onEvent) {
  const answer = await post(path, body, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new RequestError(0, "the connection ended before the text was complete; try again");
    const events = (waiting + value).split("\n\n");
    waiting = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const parsed = JSON.parse(data);
      if (parsed.error) throw new RequestError(503, parsed.error.message);
      onEvent(parsed);
    }
  }
}
