local paused = obj.spec.paused == true
local stopped = obj.spec.stopped == true

local actions = {}
actions["pause"] = { ["disabled"] = paused, ["iconClass"] = "fa fa-fw fa-pause-circle" }
actions["resume"] = { ["disabled"] = not paused, ["iconClass"] = "fa fa-fw fa-play-circle" }
actions["stop"] = { ["disabled"] = stopped, ["iconClass"] = "fa fa-fw fa-stop-circle" }
actions["start"] = { ["disabled"] = not stopped, ["iconClass"] = "fa fa-fw fa-play" }
actions["restart"] = { ["disabled"] = paused or stopped, ["iconClass"] = "fa fa-fw fa-redo" }
return actions
