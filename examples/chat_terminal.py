"""Chat in the terminal: python chat_terminal.py [MODEL_DIR]. Ctrl-D leaves."""

import sys

from staticllm import PromptTooLongError, StaticLLMPipeline, demo_model_path


def show(text: str) -> None:
    print(text, end="", flush=True)


def main() -> None:
    pipe = StaticLLMPipeline(sys.argv[1] if len(sys.argv) > 1 else demo_model_path())
    pipe.start_chat()
    while True:
        try:
            pipe.generate(input("\nYou: "), streamer=show)
        except EOFError:
            print()
            return
        except PromptTooLongError as error:
            print(f"{error}\nThe conversation starts anew.")
            pipe.start_chat()


if __name__ == "__main__":
    main()
