// The server's API, as far as the page needs it. What goes wrong is an Error whose message can be shown; an
// answer that was stopped is an AbortError.

async function ask(path, key, options = {}) {
  if (!/^[\x21-\x7e]*$/.test(key)) throw new Error("API key: ASCII letters, digits and signs are accepted");
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers }).catch((error) => {
    throw named(error, "the server cannot be reached");
  });
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  throw new Error(said?.error?.message ?? `the server answered ${response.status}`);
}

// fetch and its streams say TypeError for whatever happens to a connection.
const named = (error, message) => (error instanceof TypeError ? new Error(message) : error);

export async function firstModel(key) {
  const { data } = await (await ask("v1/models", key)).json();
  return data[0].id;
}

// The chunks of an answer, as they come.
export async function* chat(body, key, signal) {
  const broken = "the connection to the server broke off";
  const response = await ask("v1/chat/completions", key, { method: "POST", body: JSON.stringify(body), signal });
  let finished = false;
  try {
    for await (const chunk of events(response.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      finished ||= chunk.choices.some((choice) => choice.finish_reason);
      yield chunk;
    }
  } catch (error) {
    throw named(error, broken);
  }
  if (!finished) throw new Error(broken);
}

// The JSON of each server-sent event, up to OpenAI's mark of the end. This server writes it in one line.
async function* events(body) {
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
