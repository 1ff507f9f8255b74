"""A chat page in Streamlit for any server with OpenAI's chat API. Part 14, with the extra `ui`.

RUVON_URL=http://127.0.0.1:8000 streamlit run engine/client/streamlit_page.py --server.address 127.0.0.1

The server's address (RUVON_URL) and key (RUVON_API_KEY) come from this process's environment; visitors of the
page do not see them. Streamlit runs this file anew for each action of a visitor, and first ends the run that
is under way when that run next updates the page. So any button stops an answer: the run ends, its stream is
closed, and the server stops, too. The model's answer is shown as plain text. As Markdown it could contain a
picture, whose address would tell the picture's host what was said.
"""

import os
from contextlib import closing

import streamlit as st

from engine.client.stream import ChatAnswer, ChatClient, ChatFailed


def main() -> None:
    """Draw the page. Streamlit calls this again for each action of a visitor."""
    st.set_page_config(page_title="ruvon: chat")
    turns: list[dict] = st.session_state.setdefault("turns", [])
    with st.sidebar:
        system = st.text_area("What the model is told first").strip()
        options = {
            "temperature": st.slider("Temperature", min_value=0.0, max_value=2.0, value=0.8, step=0.05),
            "top_p": st.slider("Top p", min_value=0.05, max_value=1.0, value=0.95, step=0.05),
            "max_completion_tokens": st.number_input("Tokens, at most", min_value=1, value=400),
        }
        if st.button("New conversation"):
            turns.clear()
    for turn in turns:
        with st.chat_message(turn["role"]):
            st.text(turn["content"])
            if turn["caption"]:
                st.caption(turn["caption"])
    if question := st.chat_input("Say something"):
        with st.chat_message("user"):
            st.text(question)
        with st.chat_message("assistant"):
            ask(turns, question, system, options)


def ask(turns: list[dict], question: str, system: str, options: dict) -> None:
    """Ask the question, and show the answer as it comes.

    `turns` is the conversation; `system` is the model's instruction, or ""; `options` are fields of the
    request. The question and the answer are appended to `turns` when the answer's first word comes, and taken
    out again if the answer fails.
    """
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": turn["role"], "content": turn["content"]} for turn in turns]
    messages.append({"role": "user", "content": question})
    text_place, stop_place = st.empty(), st.empty()
    stop_place.button("Stop")
    url = os.environ.get("RUVON_URL", "http://127.0.0.1:8000")
    question_turn = {"role": "user", "content": question, "caption": ""}
    answer_turn = {"role": "assistant", "content": "", "caption": ""}
    are_kept = False  # whether `turns` has these two turns
    try:
        with (
            closing(ChatClient(url, os.environ.get("RUVON_API_KEY"))) as client,
            closing(client.stream(messages, **options)) as pieces,
        ):
            for _, answer in pieces:
                answer_turn.update(content=answer.text, caption=caption(answer))
                if not are_kept:  # not after the loop, because Streamlit ends a stopped run within it
                    turns += [question_turn, answer_turn]
                    are_kept = True
                text_place.text(answer.text)
    except ChatFailed as error:
        if are_kept:
            del turns[-2:]
        stop_place.empty()
        st.text(f"⚠ {error}")
        return
    st.rerun()  # draws the page again: with the answer among the turns, and without the Stop button


def caption(answer: ChatAnswer) -> str:
    """The line below an answer: milliseconds to the first word, tokens per second and the number of tokens,
    as far as they are known, and "stopped" for an answer without a finish reason.
    """
    facts = []
    if answer.first_text_seconds is not None:
        facts.append(f"first word after {1e3 * answer.first_text_seconds:.0f} ms")
    if answer.tokens_per_second:
        facts.append(f"{answer.tokens_per_second:.0f} tokens/s")
    if answer.num_tokens is not None:
        facts.append(f"{answer.num_tokens} tokens")
    if not answer.finish_reason:
        facts.append("stopped")
    return " · ".join(facts)


if __name__ == "__main__":
    main()
