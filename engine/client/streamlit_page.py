"""A chat page in Streamlit, on any server with OpenAI's chat API. Part 14, with the extra `ui`.

RUVON_URL=http://127.0.0.1:8000 streamlit run engine/client/streamlit_page.py --server.address 127.0.0.1

The server's address and key (RUVON_API_KEY) are this process's, not its visitors'. Streamlit runs the file
from its first line to its last for whatever a visitor does, and ends the run under way at its next word: any
button is a stop button. By that the stream is left, and the server stops, too. What a model says is shown as
text: a picture in Markdown would tell its host what was said.
"""

import os
from contextlib import closing

import streamlit as st

from engine.client.stream import ChatAnswer, ChatClient, ChatFailed


def main() -> None:
    """The page, from its first line to its last, as Streamlit runs it for whatever a visitor does."""
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
            if turn["caption"]:
                st.caption(turn["caption"])
    if question := st.chat_input("Say something"):
        with st.chat_message("user"):
            st.text(question)
        with st.chat_message("assistant"):
            ask(turns, question, system, options)


def ask(turns: list[dict], question: str, system: str, options: dict) -> None:
    """Show the answer as it comes. Both are turns from its first word on; not if it fails."""
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": turn["role"], "content": turn["content"]} for turn in turns]
    messages.append({"role": "user", "content": question})
    text_place, stop_place = st.empty(), st.empty()
    stop_place.button("Stop")
    url = os.environ.get("RUVON_URL", "http://127.0.0.1:8000")
    new_turns: list[dict] = [{"role": "user", "content": question, "caption": ""}, {"role": "assistant"}]
    try:
        with (
            closing(ChatClient(url, os.environ.get("RUVON_API_KEY"))) as client,
            closing(client.stream(messages, **options)) as pieces,
        ):
            for number, (_, answer) in enumerate(pieces):
                new_turns[1].update(content=answer.text, caption=caption(answer))
                if number == 0:  # kept from now on: when this run is stopped, the next has already begun
                    turns += new_turns
                text_place.text(answer.text)
    except ChatFailed as error:
        turns[:] = [turn for turn in turns if not any(turn is new for new in new_turns)]
        stop_place.empty()
        st.text(f"⚠ {error}")
        return
    st.rerun()  # shows it among the turns, and no Stop


def caption(answer: ChatAnswer) -> str:
    """What stands below an answer: its first word's milliseconds, its speed, its tokens, as far as known."""
    facts = (
        []
        if answer.first_text_seconds is None
        else [f"first word after {1e3 * answer.first_text_seconds:.0f} ms"]
    )
    facts += [f"{answer.tokens_per_second:.0f} tokens/s"] if answer.tokens_per_second else []
    facts += [f"{answer.num_tokens} tokens"] if answer.num_tokens is not None else []
    return " · ".join([*facts, *([] if answer.finish_reason else ["stopped"])])


if __name__ == "__main__":
    main()
