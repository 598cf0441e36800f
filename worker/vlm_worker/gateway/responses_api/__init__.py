"""`/v1/responses`: OpenAI's Responses API, stateless, as a translation onto the chat path.

    body ─▶ translation (items, fields) ─▶ a chat's body ─▶ the chat path ─▶ tokens
                └─ paths: errors name the client's fields      output, writer ─▶ items and events

paths           names of a request's parts here and in the chat
fields          tables of parameters
items           `input`: items to messages
translation     a whole request, and what its answer repeats
output          text, reasoning and calls to output items and their events
writer          the response object, whole or as a stream
dialect         one request, as the endpoint sees it
"""
