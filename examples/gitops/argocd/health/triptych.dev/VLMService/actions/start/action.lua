obj.spec.stopped = nil
return obj
