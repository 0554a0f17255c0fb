-- Publishes to a channel, and returns how many clients have received the message, or an error. A wake-up is a
-- hint: nothing is lost if it is refused.
local function wake(channel, message)
  local heard = redis.pcall('SPUBLISH', channel, message)
  if type(heard) == 'table' and heard.err and string.find(heard.err, 'Unknown Redis command', 1, true) then
    heard = redis.pcall('PUBLISH', channel, message)
  end
  return heard
end

