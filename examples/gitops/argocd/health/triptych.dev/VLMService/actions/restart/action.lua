-- Each new value replaces all pods of the service by a rollout.
local os = require("os")
if obj.metadata.annotations == nil then
  obj.metadata.annotations = {}
end
obj.metadata.annotations["triptych.dev/restarted-at"] = os.date("!%Y-%m-%dT%XZ")
return obj
