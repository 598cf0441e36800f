-- Health of a VLMPool: the rules of kstatus. The readiness of its pods is part of the VLMService.
-- Argo CD loads no string library for scripts of argocd-cm.
if obj.metadata.deletionTimestamp ~= nil then
  return { status = "Progressing", message = "the pool is being deleted" }
end

if obj.status == nil then
  return { status = "Progressing", message = "no operator has written a status yet" }
end

if obj.status.conditions ~= nil then
  for _, condition in ipairs(obj.status.conditions) do
    if condition.type == "Stalled" and condition.status == "True" then
      return { status = "Degraded", message = condition.message }
    end
  end
end

local ready = obj.status.readyReplicas or 0
return { status = "Healthy", message = ready .. " of " .. obj.spec.replicas .. " pods are ready" }
