// The server's API, as far as the chat page needs it.

import { ask, events, named } from "./stream.js";

// The card of the first model: `id`, and where the server knows it `max_model_len`.
export async function firstModel(key) {
  const { data } = await (await ask("v1/models", key)).json();
  return data[0];
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
