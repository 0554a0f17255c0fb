-- Abandons an attempt: gives back its lease and its reservation, and refuses its commands in
-- transit.
--
-- KEYS  1 lock  2 ended attempts  3 reservation
-- ARGV  1 token  2 life of the mark, ms  3 how many marks are kept
--
-- Returns 1 if it released a lease, 0 if the attempt held nothing.

local time = redis.call('TIME')
local ms = math.floor((tonumber(time[1]) * 1000000 + tonumber(time[2])) / 1000)
local taken = 0
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
  taken = 1
end
if string.sub(redis.call('GET', KEYS[3]) or '', -#ARGV[1]) == ARGV[1] then redis.call('DEL', KEYS[3]) end
local life = math.max(redis.call('PTTL', KEYS[2]), ARGV[2])
-- First this: without the permission for it, no key may be left without a TTL.
redis.call('PEXPIRE', KEYS[2], life)
redis.call('ZADD', KEYS[2], string.format('%.0f', ms + ARGV[2]), ARGV[1])
redis.call('PEXPIRE', KEYS[2], life)
redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -1 - ARGV[3])
return taken
