-- What the scripts of locks remember of attempts that have ended: a sorted set of their tokens by the
-- time until which each is remembered, ms. Of too many those that expire first are dropped.

-- Remembers an attempt for life ms, so that a command of it that arrives late acquires nothing.
local function mark(call, ended, token, ms, life, most)
  local short = redis.call('PTTL', ended) < tonumber(life)
  -- First this: without the permission for it, no key may be left without a TTL.
  if short then redis.call('PEXPIRE', ended, life) end
  call('ZADD', ended, string.format('%.0f', ms + life), token)
  if short then redis.call('PEXPIRE', ended, life) end
  call('ZREMRANGEBYRANK', ended, 0, -1 - most)
end
