// Calls to the router that served this page, with the key that was given in this tab.

const KEY = "manylora-key";

export const key = () => sessionStorage.getItem(KEY) ?? "";
export const keep = (given) => sessionStorage.setItem(KEY, given);
export const forget = () => sessionStorage.removeItem(KEY);

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function refusal(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // a proxy's answer: the status has to do
  }
  return new Refused(response.status, message);
}

export async function get(path) {
  let response;
  try {
    response = await fetch(path, { headers: { authorization: `Bearer ${key()}` }, cache: "no-store" });
  } catch {
    throw new Refused(0, "The router does not answer.");
  }
  if (!response.ok) throw await refusal(response);
  return response.json();
}

export const data = (what) => get(`/console/api/${what}`);

/** Each event of a stream, as a document. */
export async function* stream(path, body, headers, signal) {
  const response = await fetch(path, {
    method: "POST",
    headers: { authorization: `Bearer ${key()}`, "content-type": "application/json", ...headers },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await refusal(response);
  yield { requestId: response.headers.get("x-manylora-request-id") ?? "" };
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ") || event === "data: [DONE]") continue;
      const document = JSON.parse(event.slice(6));
      if (document.error) throw new Refused(200, document.error.message);
      yield document;
    }
  }
}
