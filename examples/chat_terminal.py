"""Chat in the terminal: python chat_terminal.py [MODEL_DIR]. Ctrl-C stops an answer; at the prompt it ends the chat."""

import sys

from staticllm import StaticLLMError, StaticLLMPipeline, demo_model_path


def main() -> None:
    try:
        pipe = StaticLLMPipeline(sys.argv[1] if len(sys.argv) > 1 else demo_model_path())
    except StaticLLMError as error:
        sys.exit(f"The model could not be loaded: {error}")
    pipe.start_chat()
    while True:
        try:
            prompt = input("\nYou: ")
        except (EOFError, KeyboardInterrupt):
            return print()
        try:
            if prompt.strip():
                pipe.generate(prompt, streamer=lambda text: print(text, end="", flush=True))
        except KeyboardInterrupt:
            print(" [stopped; this turn is forgotten]")
        except StaticLLMError as error:
            print(f"{error}\nThe conversation starts over.")
            pipe.start_chat()


if __name__ == "__main__":
    main()
