obj.spec.stopped = true
return obj
