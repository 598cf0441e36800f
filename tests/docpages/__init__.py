"""What the pages of the documentation show, and whether it exists.

blocks     pages, their fenced blocks and code in sentences
shell      a shell line as its commands
cobra      flags of kubectl and helm, from their own help
commands   a checker for each program that a page calls
manifests  a checker for each kind of YAML that a page shows
"""
