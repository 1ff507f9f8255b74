// Requests to the server that sent this page, and its server-sent events. What goes wrong is an Error whose message
// can be shown, and which has the `status` of the server's answer, if there was one; what was stopped is an
// AbortError.

export async function ask(path, key, options = {}) {
  if (!/^[\x21-\x7e]*$/.test(key)) throw new Error("API key: ASCII letters, digits and signs are accepted");
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers }).catch((error) => {
    throw named(error, "the server cannot be reached");
  });
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  const error = new Error(said?.error?.message ?? `the server answered ${response.status}`);
  throw Object.assign(error, { status: response.status });
}

// fetch and its streams say TypeError for whatever happens to a connection.
export const named = (error, message) => (error instanceof TypeError ? new Error(message) : error);

// The JSON of each server-sent event, up to OpenAI's mark of the end. This server writes it in one line.
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
