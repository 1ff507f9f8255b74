"""A chat page in Streamlit, on any server with OpenAI's chat API. Part 14, with the extra `ui`.

RUVON_URL=http://127.0.0.1:8000 streamlit run engine/client/streamlit_page.py --server.address 127.0.0.1

The server's address and key (RUVON_API_KEY) are this process's, not its visitors'. Streamlit runs the file
from its first line to its last for whatever a visitor does, and for that raises in the run under way, at its
next word: so any button is a stop button. By that the stream is left, and the server stops, too. What a model
says is shown as text: a picture in Markdown would tell its host what was said.
"""

import os
from contextlib import closing

import streamlit as st

from engine.client.stream import Answer, ChatClient, ChatFailed


def main() -> None:
    st.set_page_config(page_title="ruvon: chat")
    turns: list[dict] = st.session_state.setdefault("turns", [])
    with st.sidebar:
        system = st.text_area("What the model is told first").strip()
        options = {
            "temperature": st.slider("Temperature", 0.0, 2.0, 0.8, 0.05),
            "top_p": st.slider("Top p", 0.05, 1.0, 0.95, 0.05),
            "max_completion_tokens": st.number_input("Tokens, at most", 1, value=400),
        }
        if st.button("New conversation"):
            turns.clear()
    for turn in turns:
        with st.chat_message(turn["role"]):
            st.text(turn["content"])
            if turn["took"]:
                st.caption(turn["took"])
    if question := st.chat_input("Say something"):
        with st.chat_message("user"):
            st.text(question)
        with st.chat_message("assistant"):
            ask(turns, question, system, options)


def ask(turns: list[dict], question: str, system: str, options: dict) -> None:
    """Show the answer as it comes. Both join `turns` in the end, or where it is stopped; not if it fails."""
    told = [{"role": "system", "content": system}] if system else []
    said = [{"role": turn["role"], "content": turn["content"]} for turn in turns]
    messages = [*told, *said, {"role": "user", "content": question}]
    words, stop, answer = st.empty(), st.empty(), Answer()
    stop.button("Stop")
    url = os.environ.get("RUVON_URL", "http://127.0.0.1:8000")
    try:
        with (
            closing(ChatClient(url, os.environ.get("RUVON_API_KEY"))) as client,
            closing(client.stream(messages, **options)) as pieces,
        ):
            for _, so_far in pieces:
                answer = so_far
                words.text(answer.text)
    except ChatFailed as error:
        answer = Answer()
        stop.empty()
        st.text(f"⚠ {error}")
        return
    finally:
        if answer.text or answer.finish_reason:
            turns.append({"role": "user", "content": question, "took": ""})
            turns.append({"role": "assistant", "content": answer.text, "took": took(answer)})
    st.rerun()  # shows it among the turns, and no Stop


def took(answer: Answer) -> str:
    said = [] if answer.first_word is None else [f"first word after {1e3 * answer.first_word:.0f} ms"]
    said += [f"{answer.tokens_per_second:.0f} tokens/s"] if answer.tokens_per_second else []
    said += [f"{answer.num_tokens} tokens"] if answer.num_tokens is not None else []
    return " · ".join([*said, *([] if answer.finish_reason else ["stopped"])])


if __name__ == "__main__":
    main()
