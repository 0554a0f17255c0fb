-- Prolongs the lease if this token still holds it. A lost lease stays lost.
--
-- KEYS  1 lock  2 ended attempts
-- ARGV  1 token  2 life of the lease, ms
--
-- Returns 1 if the lease is prolonged, 0 if it is lost.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  -- A write: a replica refuses it, since its data may be old.
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', 0)
  return 0
end
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 1
