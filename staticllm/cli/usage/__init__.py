"""How commands are given: arguments that are models or text, groups of options, and files of options."""
