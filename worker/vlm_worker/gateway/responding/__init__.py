"""Answers in parts: reasoning, content and tool calls, by transformers' `response_template`.

patterns        regular expressions in linear time that know what more text could still match
json_stream     JSON, and its dialects, piece by piece
template        the format, read from a dict
builtin         templates of ours, and which one a model gets
calls           one tool call, piece by piece
parser          text of an answer -> events
enforceable     the schemas of strict tools that rules of our own enforce
dialect_grammar rules of JSON values, in a dialect or within tags
tag_grammar     rules of arguments in tags
tool_grammar    the grammar of the calls that a template and its tools allow
"""
