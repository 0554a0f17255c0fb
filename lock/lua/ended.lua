-- What the scripts of locks remember of attempts that have ended: a sorted set of their tokens by the
-- time until which each is remembered, ms. Too many with about the same end are dropped, the first
-- to end first. So marks that live twice as long as others and those others do not push each other out.

-- Remembers an attempt for life ms, so that a command of it that arrives late acquires nothing.
local function mark(call, ended, token, ms, life, most)
  if not call('ZCARD', ended) then return end -- a foreign key must not get a TTL
  local short = redis.call('PTTL', ended) < tonumber(life)
  -- First this: without the permission for it, no key may be left without a TTL.
  if short then redis.call('PEXPIRE', ended, life) end
  call('ZADD', ended, string.format('%.0f', ms + life), token)
  if short then redis.call('PEXPIRE', ended, life) end
  local half = string.format('%.0f', ms + life / 2)
  local many = call('ZCOUNT', ended, '(' .. half, string.format('%.0f', ms + life))
  if type(many) == 'number' and many > tonumber(most) then
    local first = redis.call('ZCOUNT', ended, '-inf', half)
    redis.call('ZREMRANGEBYRANK', ended, first, first + many - most - 1)
  end
end
