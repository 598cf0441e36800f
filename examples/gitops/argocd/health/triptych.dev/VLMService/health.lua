-- Health of a VLMService: the rules of kstatus, and Suspended for spec.stopped and spec.paused.
-- Argo CD loads no string library for scripts of argocd-cm.
local function health(status, message)
  return { status = status, message = message }
end

local conditions = {}
if obj.status ~= nil and obj.status.conditions ~= nil then
  for _, condition in ipairs(obj.status.conditions) do
    conditions[condition.type] = condition
  end
end

local function is(kind, status)
  return conditions[kind] ~= nil and conditions[kind].status == status
end

local ready = conditions["Ready"]

if obj.metadata.deletionTimestamp ~= nil then
  if is("Ready", "False") then
    return health("Progressing", ready.message)
  end
  return health("Progressing", "the service is being deleted")
end

if ready == nil then
  return health("Progressing", "no operator has written a status yet")
end

if obj.status.observedGeneration ~= nil and obj.status.observedGeneration ~= obj.metadata.generation then
  return health("Progressing", "the operator has not observed generation " .. obj.metadata.generation .. " yet")
end

if is("Reconciling", "True") then
  return health("Progressing", conditions["Reconciling"].message)
end

if is("Stalled", "True") then
  if conditions["Stalled"].reason == "Paused" then
    return health("Suspended", conditions["Stalled"].message)
  end
  return health("Degraded", conditions["Stalled"].message)
end

if obj.spec.stopped == true then
  return health("Suspended", ready.message)
end

if obj.spec.paused == true then
  return health("Suspended", "spec.paused is set: " .. ready.message)
end

if is("Ready", "True") then
  return health("Healthy", ready.message)
end
return health("Progressing", ready.message)
